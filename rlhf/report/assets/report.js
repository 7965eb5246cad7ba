"use strict";
// Makes the page's curves interactive, tables sortable and searchable, and tokens tinted. Without it the page is complete.

const island = JSON.parse(document.getElementById("data").textContent);
const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const format = (value) => value == null ? "" : Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3)
  ? value.toExponential(1).replace(".0e", "e") : String(Number(value.toPrecision(4)));

const wholeSteps = [...Array(12).keys()].flatMap((power) => [1, 2, 5].map((factor) => factor * 10 ** power));
const plots = new Map();

function draw(holder) {
  const chart = island.charts[holder.dataset.chart];
  const height = Math.max(holder.clientHeight, 120);
  const data = [chart.x], series = [{}], bands = [];
  const isLog = chart.scale === "log" && chart.series.every((one) => one.values.every((value) => value == null || value > 0));
  for (const one of chart.series) {
    const color = shade(`--s${one.color}`);
    data.push(one.values);
    series.push({
      label: one.label, stroke: color, width: 1.5, spanGaps: true,
      dash: one.dots ? [5, 4] : undefined, points: { show: one.dots || chart.x.length === 1, size: 5, fill: color },
    });
    if (one.margin) {
      const edge = (sign) => one.values.map((value, at) => value == null ? null : value + sign * (one.margin[at] || 0));
      data.push(edge(1), edge(-1));
      series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
      bands.push({ series: [series.length - 2, series.length - 1], fill: `${color}29` });
    }
  }
  const legend = holder.parentElement.querySelector(".legend");
  const named = chart.series.map((one, number) => ({ one, value: legend.children[number] }));
  const axis = { stroke: shade("--faint"), grid: { stroke: shade("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const tens = (_, ticks) => isLog ? ticks.map((tick) => Math.abs(Math.log10(tick) % 1) < 1e-6 ? tick : null) : ticks;
  holder.replaceChildren();
  const plot = new uPlot({
    width: holder.clientWidth, height, series, bands,
    scales: {
      x: { time: false },
      y: isLog ? { distr: 3 } : { range: (_, low, high) => low === high ? [low - 0.5, high + 0.5] : uPlot.rangeNum(low, high, 0.1, true) },
    },
    axes: [
      { ...axis, size: 28, gap: 6, grid: { show: false }, space: 60, incrs: wholeSteps },
      { ...axis, size: 46, gap: 3, space: 32, filter: tens, grid: { ...axis.grid, filter: tens }, values: (_, ticks) => ticks.map((tick) => tick == null ? "" : format(tick)) },
    ],
    legend: { show: false },
    cursor: { sync: { key: chart.group }, points: { size: 6 }, drag: { x: true, y: false } },
    hooks: {
      setCursor: [(self) => {
        const at = self.cursor.idx;
        legend.lastElementChild.textContent = at == null ? "" : `step ${chart.x[at].toLocaleString("en")}`;
        for (const { one, value } of named) {
          value.querySelector("b").textContent = at == null || one.values[at] == null ? "" : ` ${format(one.values[at])}`;
        }
      }],
    },
  }, data, holder);
  plots.set(holder, plot);
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries.filter((one) => one.isIntersecting && !plots.has(one.target))) draw(entry.target);
}, { rootMargin: "300px" });
const holders = [...document.querySelectorAll(".plot[data-chart]")];
for (const holder of holders) { holder.style.height = `${holder.clientHeight}px`; seen.observe(holder); }

function redraw() {
  for (const [holder, plot] of plots) { plot.destroy(); draw(holder); }
}
let pause;
addEventListener("resize", () => { clearTimeout(pause); pause = setTimeout(redraw, 150); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  for (const button of table.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const head = button.parentElement, column = head.cellIndex;
      const falling = head.getAttribute("aria-sort") !== "descending";
      for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const key = (row) => Number(row.cells[column].dataset.value);
      const rows = [...body.rows].sort((one, other) => (key(one) - key(other)) * (falling ? -1 : 1));
      body.append(...rows);
    });
  }
  const tools = document.querySelector(`[data-filter="${table.id}"]`);
  tools.hidden = false;
  const count = tools.querySelector("output");
  tools.querySelector("input").addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase();
    let shown = 0;
    for (const row of body.rows) { row.hidden = !row.textContent.toLowerCase().includes(wanted); shown += !row.hidden; }
    count.textContent = wanted ? `${shown} of ${body.rows.length}` : "";
  });
}

const choice = document.getElementById("tint");
if (choice) {
  choice.closest(".tools").hidden = false;
  const tint = () => {
    for (const [number, sample] of [...document.querySelectorAll(".tokens")].entries()) {
      const values = island.tokens[number][choice.value] || [];
      const largest = Math.max(...values.map(Math.abs), 1e-9);
      for (const [at, piece] of [...sample.children].entries()) {
        const value = values[at], share = value == null ? 0 : Math.abs(value) / largest;
        piece.style.background = share ? `color-mix(in srgb, ${shade(value > 0 ? "--s0" : "--s1")} ${Math.round(share * 55)}%, transparent)` : "";
        piece.title = value == null ? "" : `${choice.selectedOptions[0].text} ${format(value)}`;
      }
    }
  };
  choice.addEventListener("change", tint);
  tint();
}

if (island.refresh) setTimeout(() => location.reload(), island.refresh * 1000);
