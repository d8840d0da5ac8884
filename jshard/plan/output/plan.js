// Draws the timelines: a row per stream, a box per event; the pointer zooms and moves.
const data = JSON.parse(document.getElementById("timeline").textContent);
const LABEL = 118, TOP = 46, ROW = 40, SPACE = 8, RIGHT = 10, BAND = 18; // px
const HEIGHT = TOP + data.streams.length * (ROW + SPACE) + 4;
const [STREAM, KIND, START, TIME, WHAT, PHASE, SOURCE, NAME, BYTES, FLOPS] = Array(10).keys();

const inTime = (us) => (us >= 1e4 ? `${(us / 1e3).toFixed(1)} ms`
  : us >= 1e3 ? `${(us / 1e3).toFixed(2)} ms` : `${us.toFixed(1)} µs`);
const inUnits = (n, base, units) => {
  let i = 0;
  while (n >= base && i < units.length - 1) { n /= base; i += 1; }
  return `${n.toFixed(i && n < 100 ? 1 : 0)} ${units[i]}`;
};
const bytes = (n) => inUnits(n, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const flops = (n) => inUnits(n, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"]);
const rows = data.streams.map((_, i) => data.events.filter((e) => e[STREAM] === i));

// The phases of the compute stream.
const phases = [];
for (const e of rows[data.streams.indexOf("compute")] || []) {
  const last = phases.at(-1);
  if (last && last.phase === e[PHASE]) last.end = e[START] + e[TIME];
  else phases.push({ phase: e[PHASE], start: e[START], end: e[START] + e[TIME] });
}

// Events of a stream do not overlap.
const lastBefore = (row, time) => row.findLastIndex((e) => e[START] <= time);

function timeline(figure) {
  const canvas = figure.querySelector("canvas"), pen = canvas.getContext("2d");
  let start = Number(figure.dataset.start), end = Number(figure.dataset.end), width = 0;
  const margin = start > 0 ? (end - start) * 0.02 : 0;
  start -= margin;
  end += margin;
  const first = [start, end];

  const x = (us) => LABEL + ((us - start) / (end - start)) * (width - LABEL - RIGHT);
  const time = (px) => start + ((px - LABEL) / (width - LABEL - RIGHT)) * (end - start);
  const y = (stream) => TOP + stream * (ROW + SPACE);

  function draw() {
    const css = getComputedStyle(document.documentElement);
    const color = (name) => css.getPropertyValue(`--${name}`).trim();
    const scale = window.devicePixelRatio || 1;
    width = canvas.clientWidth;
    canvas.width = width * scale;
    canvas.height = HEIGHT * scale;
    canvas.style.height = `${HEIGHT}px`;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, HEIGHT);
    const font = getComputedStyle(document.body).fontFamily;

    pen.font = `11px ${font}`;
    pen.textAlign = "center";
    const labels = Math.min(9, Math.max(2, Math.floor((width - LABEL) / 70)));
    const rough = (end - start) / labels, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    const digits = Math.max(0, Math.ceil(-Math.log10(step / 1e3)));
    for (let at = Math.ceil(start / step) * step; at <= end; at += step) {
      pen.fillStyle = color("rule");
      pen.fillRect(x(at), 18, 1, HEIGHT - 20);
      pen.fillStyle = color("soft");
      const text = `${(at / 1e3).toFixed(digits)} ms`;
      const half = pen.measureText(text).width / 2;
      if (x(at) + half < width) pen.fillText(text, Math.max(x(at), LABEL + half - 8), 11);
    }
    pen.save();
    pen.beginPath();
    pen.rect(LABEL, 0, width - LABEL - RIGHT, HEIGHT);
    pen.clip();
    for (const { phase, start: from, end: to } of phases) {
      const left = Math.max(x(from), LABEL), right = Math.min(x(to), width - RIGHT);
      if (right - left < 1) continue;
      pen.fillStyle = color("band");
      pen.fillRect(left + 0.5, TOP - 6 - BAND, right - left - 1, BAND);
      pen.fillStyle = color("ink");
      const text = data.texts[phase];
      if (pen.measureText(text).width < right - left - 8)
        pen.fillText(text, (left + right) / 2, TOP - 6 - BAND + 13);
    }
    for (const row of rows) {
      let painted = -Infinity;
      for (let i = Math.max(0, lastBefore(row, start)); i < row.length; i += 1) {
        const e = row[i];
        if (e[START] > end) break;
        const left = x(e[START]), right = x(e[START] + e[TIME]);
        if (right < painted + 0.4 && right - left < 0.4) continue; // too small to see
        painted = right;
        const room = right - left, top = y(e[STREAM]);
        pen.fillStyle = color(`kind-${e[KIND]}`);
        pen.fillRect(left, top, Math.max(room - (room > 3 ? 0.7 : 0), 0.4), ROW);
        const from = Math.max(left, LABEL), visible = Math.min(right, width - RIGHT) - from;
        if (visible > 34) {
          pen.fillStyle = color("box-ink");
          pen.textAlign = "left";
          label(e, from + 5, top, visible - 9);
        }
      }
    }
    pen.fillStyle = color("gap");
    const compute = data.streams.indexOf("compute");
    for (const [at, lasts] of data.gaps) {
      if (at > end || at + lasts < start) continue;
      pen.fillRect(x(at), y(compute) + ROW - 3, Math.max(x(at + lasts) - x(at), 1), 3);
    }
    pen.restore();
    pen.textAlign = "right";
    pen.font = `12px ${font}`;
    pen.fillStyle = color("soft");
    data.streams.forEach((name, i) => pen.fillText(name, LABEL - 10, y(i) + ROW / 2 + 4));
  }

  function label(e, left, top, room) {
    const lines = [data.texts[e[WHAT]], e[FLOPS] ? flops(e[FLOPS]) : bytes(e[BYTES])];
    lines.forEach((text, i) => {
      if (pen.measureText(text).width > room) {
        if (i || pen.measureText(text.slice(0, 4)).width > room) return;
        while (text.length > 3 && pen.measureText(`${text}…`).width > room) text = text.slice(0, -1);
        text += "…";
      }
      pen.globalAlpha = i ? 0.75 : 1;
      pen.fillText(text, left, top + 17 + 14 * i);
      pen.globalAlpha = 1;
    });
  }

  function show(from, to) { // at least a microsecond, at most the step
    const span = Math.min(Math.max(to - from, 1), data.seconds);
    start = Math.min(Math.max((from + to - span) / 2, 0), data.seconds - span);
    end = start + span;
    draw();
  }
  const zoom = (factor, center = (start + end) / 2) =>
    show(center - (center - start) * factor, center + (end - center) * factor);
  const move = (us) => show(start + us, end + us);

  const tip = document.createElement("div");
  tip.className = "hover";
  function point(event) {
    const box = canvas.getBoundingClientRect();
    const px = event.clientX - box.left, stream = Math.floor((event.clientY - box.top - TOP) / (ROW + SPACE));
    const at = time(px), row = rows[stream] || [], e = px < LABEL ? undefined : row[lastBefore(row, at)];
    const slack = 2 * (end - start) / width;
    if (!e || e[START] + e[TIME] + slack < at) { tip.remove(); return; }
    const lines = [
      ["b", data.texts[e[WHAT]]],
      ["span", `${data.texts[e[PHASE]]} · at ${inTime(e[START])}`],
      ["span", [inTime(e[TIME]), bytes(e[BYTES]), e[FLOPS] ? flops(e[FLOPS]) : ""].filter(Boolean).join(" · ")],
      ["small", [data.texts[e[NAME]], data.texts[e[SOURCE]]].filter(Boolean).join(" · ")],
    ];
    tip.replaceChildren(...lines.flatMap(([tag, text]) => {
      const element = document.createElement(tag);
      element.textContent = text;
      return [element, document.createElement("br")];
    }));
    figure.append(tip);
    const left = event.clientX - figure.getBoundingClientRect().left + 14;
    tip.style.left = `${Math.min(left, figure.clientWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${canvas.offsetTop + y(stream) + ROW + 6}px`;
  }

  let held = 0;
  canvas.addEventListener("pointerdown", (event) => {
    held = event.clientX;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!event.buttons) { point(event); return; }
    tip.remove();
    move(time(held) - time(event.clientX));
    held = event.clientX;
  });
  canvas.addEventListener("pointerleave", () => tip.remove());
  const under = (event) => time(event.clientX - canvas.getBoundingClientRect().left);
  canvas.addEventListener("dblclick", (event) => zoom(0.4, under(event)));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    tip.remove();
    zoom(1.0015 ** event.deltaY, under(event));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const act = {
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(...first),
      ArrowLeft: () => move((start - end) / 8), ArrowRight: () => move((end - start) / 8),
    }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  for (const button of figure.querySelectorAll("button"))
    button.addEventListener("click", () =>
      ("reset" in button.dataset ? show(...first) : zoom(Number(button.dataset.zoom))));
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}

document.querySelectorAll(".timeline").forEach(timeline);
