// Shows the values of a chart's lines at the step nearest to the pointer.
for (const svg of document.querySelectorAll("figure svg")) {
  const figure = svg.parentElement;
  const data = JSON.parse(svg.nextElementSibling.textContent);
  const [low, high, left, right] = data.x;
  const [, , bottom, top] = data.y;
  const cursor = document.createElementNS(svg.namespaceURI, "path");
  cursor.setAttribute("class", "cursor");
  const tip = document.createElement("div");
  tip.className = "tip";

  svg.addEventListener("pointermove", (event) => {
    const scale = svg.viewBox.baseVal.width / svg.getBoundingClientRect().width;
    const at = (event.clientX - svg.getBoundingClientRect().left) * scale;
    const wanted = low + ((at - left) / (right - left)) * (high - low);
    const distance = (point) => Math.abs(point[0] - wanted);
    const shown = Object.entries(data.lines).map(([name, points]) => {
      const nearest = points.reduce((a, b) => (distance(b) < distance(a) ? b : a));
      return { name, nearest };
    });
    const step = shown.map((s) => s.nearest).reduce(
      (a, b) => (distance(b) < distance(a) ? b : a))[0];
    const x = left + ((step - low) / (high - low)) * (right - left);
    cursor.setAttribute("d", `M${x} ${top}V${bottom}`);
    svg.append(cursor);
    tip.textContent = shown.map(({ name, nearest }) =>
      `${name} ${Number(nearest[1].toPrecision(5))} (step ${nearest[0]})`).join(" · ");
    figure.append(tip);
  });
  svg.addEventListener("pointerleave", () => { cursor.remove(); tip.remove(); });
}
