// The contrast of every text that is shown, as WCAG 2 computes it: those that are too low, as lines for a reader.
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (color, under = [255, 255, 255]) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = `rgb(${under.join()})`;
    canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const luminance = (color) => {
    const [r, g, b] = color.map((part) => part / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const around = (element) => (element ? [...around(element.parentElement), element] : []);
  const mixed = (over, under, share) => over.map((part, at) => part * share + under[at] * (1 - share));
  // Visible texts within these elements, the outermost first: their ground, or a text on it. One that is not opaque takes
  // all that is in it along.
  const pixel = ([outer, ...inner], text, under = [255, 255, 255]) => {
    if (!outer) return text ? rgb(text, under) : under;
    const style = getComputedStyle(outer), rect = outer.matches("svg g") && outer.querySelector(":scope > rect");
    const ground = rgb(rect ? getComputedStyle(rect).fill : style.backgroundColor, under);
    return mixed(pixel(inner, text, ground), under, Number(style.opacity));
  };
  const low = [];
  let seen = 0;
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data.trim()).join("");
    const shown = element.checkVisibility() && !element.closest("noscript, title, option, :disabled, .skip");
    if (!(text || element.value) || !shown) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    const color = element.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const path = around(element), [high, less] = [pixel(path, color), pixel(path)].map(luminance).sort((a, b) => b - a);
    const contrast = (high + 0.05) / (less + 0.05), least = size >= 24 || (size >= 18.6 && style.fontWeight >= 700) ? 3 : 4.5;
    seen += 1;
    if (contrast < least) low.push(`${contrast.toFixed(2)} ${element.tagName}.${element.getAttribute("class")}: ${text || element.value}`);
  }
  return { seen, low };
}
