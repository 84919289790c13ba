// Renders a subset of Markdown as DOM nodes. Text of a model only becomes text nodes, never markup.

const INLINE = /(`+)([^`]+?)\1|\*\*([^*]+?)\*\*|\*([^*\s][^*]*?)\*|\[([^\]]+)\]\(([^)\s]+)\)/g;

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

function inline(text) {
  const parts = [];
  let last = 0;
  for (const found of text.matchAll(INLINE)) {
    parts.push(text.slice(last, found.index));
    const [whole, , code, strong, em, label, address] = found;
    if (code !== undefined) parts.push(element('code', code));
    else if (strong !== undefined) parts.push(element('strong', strong));
    else if (em !== undefined) parts.push(element('em', em));
    else parts.push(link(whole, label, address));
    last = found.index + whole.length;
  }
  parts.push(text.slice(last));
  return parts;
}

function link(whole, label, address) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return whole;
  }
  if (!['http:', 'https:'].includes(url.protocol)) return whole;
  const anchor = element('a', label);
  anchor.href = url.href;
  anchor.rel = 'noopener noreferrer nofollow';
  anchor.target = '_blank';
  return anchor;
}

function lines(texts) {
  return texts.flatMap((text, index) => (index ? [element('br'), ...inline(text)] : inline(text)));
}

// Kinds of blocks, with the pattern of their lines.
const KINDS = [
  ['ul', /^\s*[-*+]\s+(.*)$/],
  ['ol', /^\s*\d+[.)]\s+(.*)$/],
  ['blockquote', /^>\s?(.*)$/],
  ['heading', /^#{1,6}\s+(.*)$/],
];

function kind(line) {
  for (const [name, pattern] of KINDS) {
    const found = pattern.exec(line);
    if (found) return [name, found[1]];
  }
  return line.trim() ? ['p', line] : ['blank', ''];
}

function build(name, texts) {
  if (name === 'ul' || name === 'ol') return element(name, ...texts.map((text) => element('li', ...inline(text))));
  if (name === 'heading') return element('h3', ...inline(texts.join(' ')));
  return element(name, ...lines(texts));
}

export function render(text) {
  const blocks = [];
  let open = null;
  const close = () => {
    if (open && open[0] !== 'blank') blocks.push(build(...open));
    open = null;
  };
  const all = text.split('\n');
  for (let i = 0; i < all.length; i += 1) {
    if (/^\s*```/.test(all[i])) {
      close();
      const code = [];
      for (i += 1; i < all.length && !/^\s*```/.test(all[i]); i += 1) code.push(all[i]);
      blocks.push(element('pre', element('code', code.join('\n'))));
      continue;
    }
    const [name, rest] = kind(all[i]);
    if (open?.[0] !== name || name === 'heading') {
      close();
      open = [name, []];
    }
    open[1].push(rest);
  }
  close();
  return blocks;
}
