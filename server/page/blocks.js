// The block pool as a grid with one cell per block, or per several blocks if there are too many. The color shows the owner; shared
// blocks have a second color, cached and free blocks are two grays.

import { context, css } from './chart.js';

const [FREE, CACHED, OWNED] = [0, 1, 2];
const PITCHES = [14, 12, 10, 8, 7, 6, 5];
const MAX_HEIGHT = 250;
const LEAST = 256;

export const colourOf = (request) => `--o${request % 8}`;

export class Blocks {
  constructor(canvas, detail) {
    this.canvas = canvas;
    this.detail = detail;
    this.whole = false;
    this.cells = [];
    this.at = -1;
    canvas.addEventListener('pointermove', (event) => this.point(event));
    canvas.addEventListener('pointerdown', (event) => this.point(event));
    canvas.addEventListener('pointerleave', () => this.choose(-1));
    canvas.addEventListener('focus', () => this.choose(Math.max(this.at, 0)));
    canvas.addEventListener('blur', () => this.choose(-1));
    canvas.addEventListener('keydown', (event) => this.press(event));
  }

  show(map, total) {
    this.map = map;
    this.total = total;
    this.cells = [];
    for (const [code, length] of map.runs) for (let i = 0; i < length; i += 1) this.cells.push(code);
    this.draw();
  }

  // Priority of a cell: when several share a grid cell, the highest is shown.
  rank(code) {
    return code < OWNED ? code : 1 + this.map.owners[code - OWNED].references;
  }

  // Number of map cells to show, size and number of grid cells, and map cells per grid cell.
  layout(width) {
    const used = this.cells.findLastIndex((code) => code !== FREE) + 1;
    let shown = this.cells.length;
    if (!this.whole) {
      let bound = LEAST;
      while (bound < used) bound *= 2;
      shown = Math.min(shown, bound);
    }
    const fits = (pitch) => Math.floor(width / pitch) * Math.floor(MAX_HEIGHT / pitch);
    const pitch = PITCHES.find((p) => fits(p) >= shown) ?? PITCHES.at(-1);
    const merge = Math.ceil(shown / fits(pitch));
    const count = Math.ceil(shown / merge);
    const columns = Math.floor(width / pitch);
    return { shown, pitch, merge, count, columns, rows: Math.ceil(count / columns) };
  }

  code(cell) {
    const { merge } = this.grid;
    if (merge === 1) return this.cells[cell];
    let best = FREE;
    for (const code of this.cells.slice(cell * merge, Math.min((cell + 1) * merge, this.grid.shown))) {
      if (this.rank(code) > this.rank(best)) best = code;
    }
    return best;
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width || !this.cells.length) return;
    this.grid = this.layout(width);
    const { pitch, count, columns, rows } = this.grid;
    this.canvas.style.height = `${rows * pitch}px`;
    const { pen } = context(this.canvas, rows * pitch);
    const colours = { free: css('--free'), cached: css('--cached'), ink: css('--ink') };
    const owners = this.map.owners.map((owner) => (owner.requests.length ? css(colourOf(owner.requests[0])) : colours.ink));
    const seconds = this.map.owners.map((owner) => (owner.requests.length > 1 ? css(colourOf(owner.requests[1])) : css('--sheet')));
    const size = pitch - Math.max(1, Math.round(pitch / 7));
    for (let cell = 0; cell < count; cell += 1) {
      const [x, y] = [(cell % columns) * pitch, Math.floor(cell / columns) * pitch];
      const code = this.code(cell);
      if (code < OWNED) {
        pen.fillStyle = code === CACHED ? colours.cached : colours.free;
        pen.fillRect(x, y, size, size);
      } else {
        pen.fillStyle = owners[code - OWNED];
        pen.fillRect(x, y, size, size);
        if (this.map.owners[code - OWNED].references > 1) {
          pen.fillStyle = seconds[code - OWNED];
          pen.beginPath();
          pen.moveTo(x + size, y);
          pen.lineTo(x + size, y + size);
          pen.lineTo(x, y + size);
          pen.fill();
        }
      }
      if (cell === this.at) {
        pen.strokeStyle = colours.ink;
        pen.lineWidth = 2;
        pen.strokeRect(x - 0.5, y - 0.5, size + 1, size + 1);
      }
    }
    // The default view shows the whole pool: the zoom button is not needed.
    this.complete = !this.whole && this.grid.shown === this.cells.length;
    const per = this.grid.merge * this.map.blocks_per_cell;
    const part = this.grid.shown < this.cells.length ? `blocks 0–${(this.grid.shown * this.map.blocks_per_cell - 1).toLocaleString('en')} of ` : '';
    this.caption = `${part}${this.total.toLocaleString('en')}${part ? '' : ' blocks'}${per > 1 ? `, ${per} per cell` : ''}`;
  }

  point(event) {
    if (!this.grid) return;
    const { pitch, columns, count } = this.grid;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / pitch);
    const cell = Math.floor((event.clientY - box.top) / pitch) * columns + column;
    this.choose(column >= 0 && column < columns && cell >= 0 && cell < count ? cell : -1);
  }

  press(event) {
    if (!this.grid) return;
    const { columns, count } = this.grid;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -count, End: count }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(this.at + step, 0), count - 1));
  }

  choose(cell) {
    this.at = cell;
    this.detail.textContent = cell < 0 || !this.grid ? 'Point at a block or use the arrow keys.' : this.describe(cell);
    this.draw();
  }

  describe(cell) {
    const per = this.grid.merge * this.map.blocks_per_cell;
    const [first, last] = [cell * per, Math.min((cell + 1) * per, this.total) - 1];
    const name = first === last ? `Block ${first}` : `Blocks ${first}–${last}`;
    const code = this.code(cell);
    if (code === FREE) return `${name}: free`;
    if (code === CACHED) return `${name}: cached, reusable until evicted`;
    const { requests, references } = this.map.owners[code - OWNED];
    const owner = requests.length ? `request${requests.length > 1 ? 's' : ''} ${requests.join(', ')}` : 'a finished request';
    return references > 1 ? `${name}: shared, ${references} references, owned by ${owner}` : `${name}: owned by ${owner}`;
  }
}
