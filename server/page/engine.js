// Live view of the engine: follows /quire/events while the page is visible and draws each snapshot.

import { ApiError, call, events } from './api.js';
import { Blocks, colourOf } from './blocks.js';
import { chart } from './chart.js';
import { $, element, setText, whole } from './dom.js';

const ROWS = 12;
const put = (id, text) => setText($(id), text);

export class Engine {
  constructor(onDenied, onState) {
    this.onDenied = onDenied;
    this.onState = onState;
    this.blocks = new Blocks($('blocks'), $('block-detail'));
    this.wait = 500;
    document.addEventListener('visibilitychange', () => (document.hidden ? this.pause() : this.follow()));
    window.addEventListener('resize', () => this.redraw());
    window.addEventListener('theme', () => this.redraw());
    $('zoom').addEventListener('click', (event) => {
      this.blocks.whole = !this.blocks.whole;
      event.currentTarget.setAttribute('aria-pressed', String(this.blocks.whole));
      this.redraw();
    });
  }

  pause() {
    clearTimeout(this.timer);
    this.stream?.abort();
  }

  async follow() {
    this.pause();
    const stream = new AbortController();
    this.stream = stream;
    try {
      const response = await call('quire/events', { signal: stream.signal });
      this.link('live', 'live');
      this.wait = 500;
      for await (const state of events(response)) this.show(state);
      this.link('lost', 'disconnected');
    } catch (error) {
      if (stream.signal.aborted) return;
      if (error.status === 401) {
        this.link('lost', 'API key required');
        this.onDenied();
        return;
      }
      this.link('lost', error instanceof ApiError ? 'busy' : 'unreachable');
    }
    if (stream.signal.aborted) return;
    this.timer = setTimeout(() => this.follow(), this.wait);
    this.wait = Math.min(this.wait * 2, 10_000);
  }

  link(state, text) {
    $('link').dataset.state = state;
    put('link-text', text);
  }

  redraw() {
    if (this.state) this.show(this.state);
  }

  show(state) {
    this.state = state;
    this.onState(state);
    const { blocks, stats, rates, history } = state;
    put('decode', whole(rates.decode));
    put('prefill', whole(rates.prefill));
    put('hits', stats.prefix_cache_queries ? whole((100 * stats.prefix_cache_hits) / stats.prefix_cache_queries) : '–');
    put('preempted', whole(stats.preemptions));
    this.drafts(stats.spec_decode);
    chart($('batch-chart'), history.batch, 120, '--o4', 'Batch size');
    // The newest bucket is incomplete: its sum would always drop.
    const speeds = history.decode.slice(0, -1).map((tokens) => Math.round(tokens / history.seconds));
    chart($('decode-chart'), speeds.length ? speeds : [0], 119, '--o2', 'Tokens per second');
    this.blocks.show(state.map, blocks.total);
    put('pool-count', this.blocks.caption ?? '');
    $('zoom').hidden = this.blocks.complete;
    this.legend(state);
    this.facts(state);
    this.list(state);
  }

  drafts({ num_drafts: verified, num_draft_tokens: drafts, num_accepted_tokens: accepted, accepted_per_pos: counts }) {
    $('drafts-tile').hidden = !drafts;
    if (!drafts) return;
    put('drafts', whole((100 * accepted) / drafts));
    const shares = counts.slice(0, 8).map((count) => whole((100 * count) / verified));
    put('drafts-by-position', shares.length ? `by position ${shares.join(' ')}` : '');
  }

  // What only some servers have.
  facts({ ranks, blocks, adapters, adapters_left_out: left, stored }) {
    const rows = [];
    const all = ranks.tensor_parallel * ranks.pipeline_parallel;
    if (all > 1) rows.push(['Ranks', `${all}: tensor parallel ${ranks.tensor_parallel}, pipeline parallel ${ranks.pipeline_parallel}`]);
    if (blocks.host_total) {
      const [swapped, cached] = [whole(blocks.host_in_use), whole(blocks.host_cached)];
      rows.push(['Host tier', `${swapped} blocks swapped, ${cached} cached of ${whole(blocks.host_total)}`]);
    }
    for (const { name, running, waiting } of adapters) rows.push([`Adapter ${name}`, `${running} running, ${waiting} waiting`]);
    if (left) rows.push(['Adapters', `${left} more`]);
    if (stored.records) {
      const work = `${stored.running} in the background, ${stored.resumed} resumed, ${stored.left} left to another model`;
      rows.push(['Stored', `${whole(stored.records)} records, ${Math.ceil(stored.bytes / 1024 / 1024)} MB; ${work}`]);
    }
    const key = JSON.stringify(rows);
    if (this.shownFacts === key) return;
    this.shownFacts = key;
    $('facts').hidden = !rows.length;
    $('facts').replaceChildren(...rows.map(([name, text]) => element('div', {}, element('dt', { textContent: name }), element('dd', { textContent: text }))));
  }

  legend({ blocks, map }) {
    // If cells of the map have several blocks, their states are not known one by one: only known totals are shown.
    let shared = 0;
    for (const [code, length] of map.runs) if (code > 1 && map.owners[code - 2].references > 1) shared += length;
    const exact = map.blocks_per_cell === 1;
    put('count-owned', whole(blocks.in_use - (exact ? shared : 0)));
    put('count-shared', exact ? whole(shared) : '–');
    put('count-cached', whole(blocks.cached));
    put('count-free', whole(blocks.free));
    const label = `Block pool: ${blocks.in_use} in use, ${blocks.cached} cached, ${blocks.free} free of ${blocks.total}`;
    $('blocks').setAttribute('aria-label', label);
  }

  list({ requests, requests_left_out: left, stats }) {
    const counts = [`${stats.running} running`, `${stats.waiting} waiting`];
    if (stats.swapped) counts.push(`${stats.swapped} swapped`);
    const more = requests.length + left - Math.min(requests.length, ROWS);
    put('request-count', counts.join(', ') + (more ? `; ${more} not shown` : ''));
    $('none').hidden = requests.length > 0;
    $('requests').replaceChildren(...requests.slice(0, ROWS).map(row));
  }
}

function row(request) {
  const line = document.createElement('tr');
  const cell = (text, name = 'n') => {
    const node = document.createElement('td');
    node.className = name;
    node.textContent = text;
    line.append(node);
    return node;
  };
  const swatch = document.createElement('span');
  swatch.className = 'swatch';
  swatch.style.background = `var(${colourOf(request.id)})`;
  const times = request.sequences > 1 ? ` ×${request.sequences}` : '';
  cell(`${request.id}${times}`, '').prepend(swatch);
  const partial = request.state === 'running' && request.computed_tokens < request.prompt_tokens;
  cell(partial ? `prefill ${Math.floor((100 * request.computed_tokens) / request.prompt_tokens)}%` : request.state, request.state);
  cell(`${request.age.toFixed(1)} s`);
  cell(whole(request.prompt_tokens));
  cell(whole(request.generated_tokens));
  cell(whole(request.blocks));
  return line;
}
