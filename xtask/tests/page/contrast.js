// Returns the texts with less contrast to their background than WCAG 2.2 requires (1.4.3): 4.5, or 3 for large text.
const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
const luminance = ([r, g, b]) => {
  const linear = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
};
const behind = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = numbers(getComputedStyle(e).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};
const faint = [];
let measured = 0;
for (const element of document.querySelectorAll('body *')) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!(own || element.matches('input, textarea')) || !element.checkVisibility() || element.closest('.hidden, noscript')) continue;
  const placeholder = element.matches('input, textarea') && !element.value;
  const style = getComputedStyle(element, placeholder ? '::placeholder' : null);
  const [a, b] = [luminance(numbers(style.color)), luminance(behind(element))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  const size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
  measured += 1;
  if (ratio < (large ? 3 : 4.5)) faint.push(`${element.localName}.${element.className} "${element.textContent.slice(0, 20)}" ${ratio.toFixed(2)}`);
}
if (measured < 10) faint.push(`only ${measured} texts were found`);
return faint;
