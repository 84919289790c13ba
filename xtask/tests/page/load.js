// Puts the server under load: five clients, each with requests of its own length, one after the other.
const ask = async (i) => {
  for (let round = 0; round < 60; round += 1) {
    const prompt = 'Answer as a helpful assistant that knows one small world. '.repeat(3) + i % 5 + ' ' + round;
    const body = JSON.stringify({ prompt, max_tokens: 120 + 25 * i, n: 1 + i % 3, ignore_eos: true, temperature: 1 });
    await fetch('/v1/completions', { method: 'POST', headers: { 'Content-Type': 'application/json' }, body });
  }
};
// A browser opens six connections to a server, and one of them carries the events.
for (let i = 0; i < 5; i += 1) ask(i);
document.getElementById('message').blur();
