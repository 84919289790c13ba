// Area chart of the last minute on a canvas, newest values on the right.

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Sizes the canvas to its box and returns a context in CSS pixels.
export function context(canvas, height = canvas.clientHeight) {
  const [scale, width] = [window.devicePixelRatio || 1, canvas.clientWidth];
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext('2d');
  pen.scale(scale, scale);
  return { pen, width, height };
}

// Rounds up to 1, 2 or 5 times a power of ten.
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((bound) => bound >= value);
}

export function chart(canvas, values, slots, colour, label) {
  const { pen, width, height } = context(canvas);
  if (!width) return;
  const top = ceiling(Math.max(...values, 0));
  const [left, bottom] = [0, height - 1];
  const x = (i) => width - ((values.length - 1 - i) * width) / (slots - 1);
  const y = (value) => bottom - (value / top) * (height - 16);
  pen.strokeStyle = css('--line');
  pen.beginPath();
  for (const value of [0, top]) {
    pen.moveTo(left, Math.round(y(value)) - 0.5);
    pen.lineTo(width, Math.round(y(value)) - 0.5);
  }
  pen.stroke();
  pen.fillStyle = css('--soft');
  pen.font = `11px ${css('--sans')}`;
  pen.fillText(top.toLocaleString('en'), left, 11);
  pen.beginPath();
  values.forEach((value, i) => pen.lineTo(x(i), y(value)));
  pen.strokeStyle = css(colour);
  pen.lineWidth = 1.5;
  pen.lineJoin = 'round';
  pen.stroke();
  pen.lineTo(width, bottom);
  pen.lineTo(x(0), bottom);
  pen.globalAlpha = 0.14;
  pen.fillStyle = css(colour);
  pen.fill();
  canvas.setAttribute('aria-label', `${label}: now ${values.at(-1) ?? 0}, maximum of the last minute ${Math.max(...values, 0)}`);
}
