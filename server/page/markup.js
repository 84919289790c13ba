// Makes DOM nodes of the tokens of marked's lexer. The text of a model is hostile: HTML in it stays text, links only lead to the web or to
// an address of mail and say where, and images become links. No string is ever parsed as markup.

import { element } from './dom.js';

const MAX_DEPTH = 32;
const PROTOCOLS = ['http:', 'https:', 'mailto:'];
const ENTITY = /&(?:#\d{1,7}|#x[\da-f]{1,6}|[a-z][a-z\d]{1,31});/gi;
const entities = new Map();

// The character of an entity. The parser gets nothing but `x` and the entity, and only its text is read.
function character(entity) {
  if (!entities.has(entity)) {
    if (entities.size > 500) entities.clear();
    entities.set(entity, new DOMParser().parseFromString(`x${entity}`, 'text/html').body.textContent.slice(1));
  }
  return entities.get(entity);
}

const decoded = (text) => text.replace(ENTITY, character);

function link(token, children) {
  let url;
  try {
    url = new URL(decoded(token.href));
  } catch {
    return [token.raw];
  }
  if (!PROTOCOLS.includes(url.protocol)) return [token.raw];
  return [element('a', { href: url.href, title: url.href, rel: 'noopener noreferrer nofollow', target: '_blank' }, ...children)];
}

function inline(tokens, depth) {
  return tokens.flatMap((token) => {
    if (depth > MAX_DEPTH) return [token.raw];
    switch (token.type) {
      case 'strong':
      case 'em':
      case 'del':
        return [element(token.type, {}, ...inline(token.tokens, depth + 1))];
      case 'link':
        return link(token, inline(token.tokens, depth + 1));
      case 'image':
        return link(token, [`image: ${decoded(token.text) || token.href}`]);
      case 'codespan':
        return [element('code', { textContent: token.text })];
      case 'br':
        return [element('br')];
      case 'checkbox':
        return [token.checked ? '☑ ' : '☐ '];
      case 'escape':
        return [token.text];
      case 'text':
        return token.tokens ? inline(token.tokens, depth + 1) : [decoded(token.text)];
      default:
        return [token.raw];
    }
  });
}

// The button copies the text of the code; the conversation listens to all of them.
export function code(text, language = '') {
  const name = element('span', { textContent: language.trim().split(/\s/)[0].slice(0, 40) });
  const copy = element('button', { type: 'button', className: 'quiet copy', textContent: 'Copy', ariaLabel: 'Copy code' });
  const head = element('div', { className: 'head' }, name, copy);
  return element('div', { className: 'code' }, head, element('pre', { tabIndex: 0 }, element('code', { textContent: text })));
}

function list(token, depth) {
  const items = token.items.map((item) => element('li', {}, ...nodes(item.tokens, depth + 1)));
  const start = Number.isInteger(token.start) && token.start <= 999_999_999 ? token.start : 1;
  return token.ordered ? element('ol', { start }, ...items) : element('ul', {}, ...items);
}

function table(token) {
  const row = (cells, name) =>
    element('tr', {}, ...cells.map((cell) => element(name, { className: cell.align ?? '' }, ...inline(cell.tokens, 0))));
  const head = element('thead', {}, row(token.header, 'th'));
  const body = element('tbody', {}, ...token.rows.map((cells) => row(cells, 'td')));
  const box = element('div', { className: 'table', tabIndex: 0, ariaLabel: 'Table' }, element('table', {}, head, body));
  box.setAttribute('role', 'group');
  return box;
}

function node(token, depth) {
  switch (token.type) {
    case 'space':
    case 'def':
      return [];
    case 'hr':
      return [element('hr')];
    case 'heading':
      return [element(`h${Math.min(token.depth + 2, 6)}`, {}, ...inline(token.tokens, 0))];
    case 'paragraph':
      return [element('p', {}, ...inline(token.tokens, 0))];
    case 'text': {
      const children = inline(token.tokens ?? [token], 0);
      return depth ? children : [element('p', {}, ...children)];
    }
    case 'checkbox':
      return inline([token], 0);
    case 'code':
      return [code(token.text, token.lang)];
    case 'blockquote':
      return [element('blockquote', {}, ...nodes(token.tokens, depth + 1))];
    case 'list':
      return [list(token, depth)];
    case 'table':
      return [table(token)];
    default:
      return [element('p', { className: 'raw', textContent: token.raw.trimEnd() })];
  }
}

// Nodes of block tokens; below the greatest depth, their text.
export function nodes(tokens, depth = 0) {
  return depth > MAX_DEPTH ? tokens.map((token) => token.raw) : tokens.flatMap((token) => node(token, depth));
}
