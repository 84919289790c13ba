// Defines window.colours(): the set of opaque colours on the canvas of blocks, which is what a user sees of them. Then notes the
// greatest number of colours and of listed requests.
window.colours = () => {
  const canvas = document.getElementById('blocks');
  const copy = Object.assign(document.createElement('canvas'), { width: canvas.width, height: canvas.height });
  const pen = copy.getContext('2d', { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const { data } = pen.getImageData(0, 0, copy.width, copy.height);
  const found = new Set();
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] === 255) found.add(`${data[i]},${data[i + 1]},${data[i + 2]}`);
  }
  return found;
};
window.owned = 0;
window.rows = 0;
new MutationObserver(() => {
  window.rows = Math.max(window.rows, document.querySelectorAll('#requests tr').length);
  if (document.querySelector('#requests tr')) window.owned = Math.max(window.owned, window.colours().size);
}).observe(document.getElementById('requests'), { childList: true });
return window.colours().size;
