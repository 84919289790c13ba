// Returns what is wrong with how /page/markdown.js shows texts: a list of messages.
const { Markdown, show } = await import('/page/markdown.js');
const wrong = [];
const box = (fill) => {
  const node = document.createElement('div');
  fill(node);
  return node;
};
const html = (text) => box((node) => show(node, text)).innerHTML;
const pieces = (text, size) =>
  box((node) => {
    const markdown = new Markdown(node);
    for (let i = 0; i < text.length; i += size) {
      markdown.push(text.slice(i, i + size));
      markdown.draw();
    }
    markdown.finish(text);
  }).innerHTML;
const expect = (text, selector, count, content) => {
  const found = [...box((node) => show(node, text)).querySelectorAll(selector)];
  if (found.length !== count) wrong.push(`${text}: found ${found.length} of ${selector}, expected ${count}`);
  else if (content !== undefined && found[0].textContent !== content) wrong.push(`${text}: ${selector} has ${found[0].textContent}`);
};

// What a user expects of Markdown.
expect('1. a\n\n2. b\n3. c', 'ol > li', 3);
expect('1. a\n\n2. b', 'ol', 1);
expect('7. a\n8. b', 'ol[start="7"]', 1);
expect('- a\n  - b\n    1. c', 'ul > li > ul > li > ol > li', 1, 'c');
expect('| a | b |\n|---|--:|\n| 1 | **2** |', 'table tbody td.right strong', 1, '2');
expect('~~~py\nx = 1\n~~~', '.code pre code', 1, 'x = 1');
expect('```js\na\n\nb\n```\nend', '.code pre code', 1, 'a\n\nb');
expect('```js\na\n```', '.code .copy', 1);
expect('see https://example.org/a.', 'a[href="https://example.org/a"]', 1);
expect('[r]\n\n[r]: https://example.org', 'a[rel~="noopener"][target="_blank"]', 1);
expect('- [x] done', 'li', 1, '☑ done');
expect('a &amp; b &copy; &#65;', 'p', 1, 'a & b © A');
expect('> quote\n> - item', 'blockquote li', 1);
expect('# A *b*', 'h3 em', 1, 'b');
expect('a\nb', 'br', 1);

// A text of a model is hostile.
const ALLOWED = 'a b blockquote br button code del div em h3 h4 h5 h6 hr li ol p pre span strong table tbody td th thead tr ul'.split(' ');
const hostile = [
  '<img src=x onerror="window.hit=1">', '<script>window.hit=1</script>', '<svg onload="window.hit=1">', '<iframe srcdoc="<script>parent.hit=1</script>">',
  '<a href="javascript:window.hit=1">x</a>', '[x](javascript:window.hit=1)', '[x](JaVaScRiPt:window.hit=1)', '[x](java\nscript:window.hit=1)',
  '[x](javascript&#58;window.hit=1)', '[x](javascript&colon;window.hit=1)', '[x](&#106;avascript:window.hit=1)', '[x](data:text/html,<script>1</script>)',
  '[x](vbscript:x)', '[x](file:///etc/passwd)', '[x](blob:http://a/b)', '<javascript:window.hit=1>', '[x][r]\n\n[r]: javascript:window.hit=1',
  '![x](javascript:window.hit=1)', '![x](/v1/models)', '![x](https://example.org/i.png)', '[a](https://example.org "t\\" onclick=window.hit=1")',
  '<style>body{display:none}</style>', '<form action=/x><input name=y>', '<math><mtext><script>window.hit=1</script>', '&lt;script&gt;window.hit=1&lt;/script&gt;',
  '```<img src=x onerror=window.hit=1>\n</code></pre><img src=x onerror=window.hit=1>\n```', '| <img src=x onerror=window.hit=1> |\n|-|\n| <b>x</b> |',
  '__proto__ [x][__proto__]\n\n[__proto__]: https://example.org', '[x][constructor]', '&__proto__; &constructor;', '<!-- ', '<?php', '<![CDATA[', '> '.repeat(5000), '- '.repeat(5000),
];
for (const text of hostile) {
  const node = box((node) => show(node, text));
  document.body.append(node);
  for (const found of node.querySelectorAll('*')) {
    if (!ALLOWED.includes(found.localName)) wrong.push(`${text.slice(0, 60)}: made <${found.localName}>`);
    for (const { name, value } of found.attributes) {
      if (/^on|^style$|^src/.test(name)) wrong.push(`${text.slice(0, 60)}: made ${name}`);
      if (name === 'href' && !/^(https?|mailto):/.test(value)) wrong.push(`${text.slice(0, 60)}: a link to ${value}`);
    }
  }
  node.remove();
}
await new Promise((done) => setTimeout(done, 100));
if (window.hit) wrong.push('a script of a text ran');
expect('<b>x</b>', 'p', 1, '<b>x</b>');

// However a text is cut into pieces, it looks the same in the end.
const lines = [
  '', '', 'para text', '  indented', '    code', '- item', '- [ ] task', '  - nested', '1. one', '2. two', '10) ten', '> quote', '> - q', '```', '```js', '~~~',
  '   ```', '# head', '===', '---', '***', '| a | b |', '|---|:-:|', '| 1 | `x` |', 'a **b** *c* `d', '[l](http://x.y)', '[r]', '[r]: http://r.r', '<div>', '</div>',
  '<b>x</b> &amp;', '<!-- c', '-->', '<pre>', '</pre>', '![i](http://i/i.png)', 'trail  ', 'back\\', '\tTab', '  cont', '````', 'word '.repeat(20), '\r',
];
let seed = 7;
const random = (bound) => (seed = (seed * 48271) % 2147483647) % bound;
for (let round = 0; round < 300 && wrong.length < 5; round += 1) {
  const text = Array.from({ length: 1 + random(12) }, () => lines[random(lines.length)]).join('\n');
  const size = 1 + random(9);
  if (pieces(text, size) !== html(text)) wrong.push(`in pieces of ${size}: ${JSON.stringify(text)}`);
}
const long = 'word *x* '.repeat(9000);
if (pieces(long, 997) !== html(long)) wrong.push('a block that is too long differs in pieces');

// The work is linear: characters that are read, for each character of the text.
const { Lexer } = await import('/page/vendor/marked.esm.js');
const { lex } = Lexer.prototype;
let read = 0;
Lexer.prototype.lex = function (source) {
  read += source.length;
  return lex.call(this, source);
};
for (const [name, part] of [['paragraphs', 'Some *words* in a paragraph of a text.\n\n'], ['one list', '- an item of a list\n'], ['one line', 'word '], ['code', '```\ncode\n']]) {
  const text = part.repeat(Math.ceil(120_000 / part.length));
  read = 0;
  pieces(text, 5);
  const times = read / text.length;
  if (times > 60) wrong.push(`${name}: each character is read ${times.toFixed(0)} times`);
}
Lexer.prototype.lex = lex;
return wrong;
