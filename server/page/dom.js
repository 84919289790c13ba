// Makes and changes DOM nodes. Texts only become text nodes, never markup.

export const $ = (id) => document.getElementById(id);

export const whole = (number) => Math.round(number).toLocaleString('en');

// An element with these properties; children are nodes or texts.
export function element(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

export function button(label, onClick, properties = {}) {
  const node = element('button', { type: 'button', className: 'quiet', textContent: label, ...properties });
  node.addEventListener('click', onClick);
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Changes what scrolls in a box; at its end, it stays there.
export function follow(box, change) {
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  change();
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

// Changes `parent`'s children after `before` (from the first, if null) into `fresh`. Nodes that are alike stay, and text that grows is
// appended to, so that a selection survives. Returns the last of the new children. Children after it stay if `more` are to come.
export function patch(parent, before, fresh, more = false) {
  let old = before ? before.nextSibling : parent.firstChild;
  let last = before;
  for (const node of fresh) {
    const next = old?.nextSibling ?? null;
    if (old && isAlike(old, node)) {
      last = old;
      update(old, node);
    } else {
      last = node;
      if (old) old.replaceWith(node);
      else parent.append(node);
    }
    old = next;
  }
  while (old && !more) {
    const next = old.nextSibling;
    old.remove();
    old = next;
  }
  return last;
}

function isAlike(old, node) {
  if (old.nodeName !== node.nodeName) return false;
  return old.nodeType === Node.TEXT_NODE || old.cloneNode(false).isEqualNode(node.cloneNode(false));
}

function update(old, node) {
  if (old.nodeType === Node.TEXT_NODE) grow(old, node.data);
  else patch(old, null, [...node.childNodes]);
}

// Sets the text of a text node.
export function grow(node, text) {
  if (node.data === text) return;
  if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
  else node.data = text;
}
