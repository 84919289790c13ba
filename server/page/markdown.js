// Shows Markdown while it is streamed. A block that is complete is made once and never touched again. Only the open block at the end is read
// again when it grows: a short one in each frame, a long one each time that it has grown by a sixteenth, or to twice its length if reading
// it took long. The text since then is shown as it is. So the work for an answer is linear in its length, and a selection survives.

import { grow, patch } from './dom.js';
import { code, nodes } from './markup.js';
import { Lexer } from './vendor/marked.esm.js';

// Greatest length of a block that is not fenced code. A longer one is cut.
const MAX_BLOCK = 16_384;
// Up to this length, the open block is read in each frame.
const SHORT = 2048;
// Milliseconds after which reading a block took long.
const LONG = 12;
// Greatest number of definitions of links.
const MAX_LINKS = 256;
const BLANK = /^(?:[ \t]*\n)+/;
const FENCE = /^( {0,3})(`{3,}(?=[^`\n]*\n)|~{3,})([^\n]*)\n/;

function lex(source, links) {
  const lexer = new Lexer({ gfm: true, breaks: true });
  lexer.tokens.links = Object.assign(Object.create(null), links);
  try {
    return [...lexer.lex(source)];
  } catch {
    // Nested too deeply.
    return [{ type: 'raw', raw: source }];
  }
}

// Number of tokens before the last block, which further lines may continue.
const completed = (tokens) => Math.max(0, tokens.findLastIndex((token) => token.type !== 'space'));

const isFenced = (token) => token.type === 'code' && token.codeBlockStyle !== 'indented';

export class Markdown {
  constructor(box) {
    this.box = box;
    this.links = Object.create(null);
    this.tail = document.createTextNode('');
    this.begin();
  }

  begin() {
    this.rest = '';
    this.read = 0;
    this.next = 0;
    this.fence = null;
    this.last = null;
  }

  push(text) {
    this.rest += text.replaceAll('\r', '');
  }

  // Shows what has been pushed.
  draw(isWhole = false) {
    this.tail.remove();
    while (this.fence ? this.fill(isWhole) : this.advance(isWhole));
  }

  // Shows the end. A link may be defined after its use: then all of `text` is read again with the known definitions.
  finish(text) {
    this.draw(true);
    if (!Object.keys(this.links).length) return;
    this.begin();
    this.push(text);
    this.draw(true);
  }

  // Reads what is open. Returns whether a block was completed.
  advance(isWhole) {
    this.rest = this.rest.replace(BLANK, '');
    if (this.openFence()) return true;
    const size = this.rest.length;
    if (!isWhole && size > SHORT && size < Math.min(this.next, MAX_BLOCK)) {
      this.tail.data = this.rest.slice(this.read);
      this.box.append(this.tail);
      return false;
    }
    const begin = performance.now();
    const source = this.rest.slice(0, MAX_BLOCK);
    let tokens = lex(source, this.links);
    let count = tokens.length;
    if (!isWhole || source.length < size) {
      count = completed(tokens);
      // A line that is not complete can make the lines before it anything.
      const end = source.lastIndexOf('\n') + 1;
      if (count && end < source.length) {
        const known = lex(source.slice(0, end), this.links);
        count = completed(known);
        if (count) tokens = known;
      }
    }
    const fenced = tokens.findIndex((token, i) => i > 0 && isFenced(token));
    if (fenced > 0) count = Math.min(count, fenced);
    if (!count && source.length === MAX_BLOCK) {
      tokens = lex(cut(source), this.links);
      count = tokens.length;
    }
    if (!count) {
      patch(this.box, this.last, nodes(tokens));
      this.read = size;
      this.next = size * (performance.now() - begin > LONG ? 2 : 17 / 16);
      return false;
    }
    tokens = tokens.slice(0, count);
    tokens.filter(({ type }) => type === 'def').forEach((token) => this.define(token));
    const length = tokens.reduce((sum, token) => sum + token.raw.length, 0);
    this.rest = this.rest.slice(length);
    this.next = 0;
    this.last = patch(this.box, this.last, nodes(tokens), this.rest !== '');
    return this.rest !== '';
  }

  define({ tag, href, title }) {
    if (!(tag in this.links) && Object.keys(this.links).length < MAX_LINKS) this.links[tag] = { href, title };
  }

  openFence() {
    const found = FENCE.exec(this.rest);
    if (!found) return false;
    const [line, indent, mark, language] = found;
    this.rest = this.rest.slice(line.length);
    this.last = patch(this.box, this.last, [code('', language)], true);
    const body = this.last.querySelector('code');
    const [text, tail] = [document.createTextNode(''), document.createTextNode('')];
    body.replaceChildren(text, tail);
    const end = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \\t]*$`, 'm');
    this.fence = { text, tail, end, indent: new RegExp(`^ {0,${indent.length}}`, 'gm'), isEmpty: true };
    return true;
  }

  // Appends lines to fenced code, up to the line that ends it. Returns whether there is more behind it.
  fill(isWhole) {
    const { fence } = this;
    const complete = isWhole ? this.rest.length : this.rest.lastIndexOf('\n') + 1;
    const found = fence.end.exec(this.rest.slice(0, complete));
    const length = found ? found.index : complete;
    if (length) {
      const lines = this.rest.slice(0, length).replace(/\n$/, '').replace(fence.indent, '');
      fence.text.appendData(fence.isEmpty ? lines : `\n${lines}`);
      fence.isEmpty = false;
    }
    this.rest = this.rest.slice(found ? length + found[0].length + 1 : length);
    // The line that is not complete, unless it may become the end.
    const open = found || /^ {0,3}[`~]*$/.test(this.rest) ? '' : this.rest.replace(fence.indent, '');
    grow(fence.tail, open && !fence.isEmpty ? `\n${open}` : open);
    if (found) {
      this.fence = null;
      this.next = 0;
    }
    if (found && this.rest) return true;
    // What was shown behind the code before it was known to be code.
    while (this.last.nextSibling) this.last.nextSibling.remove();
    return false;
  }
}

// The first part of a block that is too long, up to the end of a line or a word.
function cut(source) {
  const least = source.length / 2;
  const at = [source.lastIndexOf('\n') + 1, source.lastIndexOf(' ') + 1].find((end) => end > least);
  return source.slice(0, at ?? source.length);
}

// The nodes of a whole text.
export function show(box, text) {
  const markdown = new Markdown(box);
  markdown.push(text);
  markdown.finish(text);
}
