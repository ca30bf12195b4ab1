"use strict";
// Draws the curves of the metrics with uPlot, from the data in #plots.
(() => {
  const HEIGHT = 210;
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const digits = (value) => (value == null ? "–" : String(Number(value.toPrecision(6))));
  const short = (value) => {
    const size = Math.abs(value);
    if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
    return value.toLocaleString("en", { maximumSignificantDigits: 5 });
  };

  // Dashed lines where attempts began, and red marks at the edge for values that are no finite numbers.
  const marks = (plot) => (u) => {
    const { ctx, bbox } = u, ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.strokeStyle = color("soft");
    ctx.lineWidth = ratio;
    ctx.setLineDash([4 * ratio, 4 * ratio]);
    for (const step of plot.starts) {
      const x = u.valToPos(step, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.fillStyle = color("mark");
    for (const [step, value] of plot.marks) {
      const top = value === "inf", y = top ? bbox.top : bbox.top + bbox.height, x = u.valToPos(step, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, y + (top ? 9 : -9) * ratio);
      ctx.lineTo(x - 5 * ratio, y);
      ctx.lineTo(x + 5 * ratio, y);
      ctx.fill();
    }
    ctx.restore();
  };

  const make = (plot, place, isLog) => {
    const axis = { stroke: () => color("soft"), grid: { stroke: () => color("line"), width: 1 }, ticks: { show: false } };
    const series = plot.parts.map((part) => ({
      label: "value",
      class: part.kept ? "kept" : "repeated",
      stroke: () => color(part.kept ? "curve" : "repeated-curve"),
      width: 1.5,
      points: { show: part.x.length < 3, size: 6 },
      value: (u, value) => digits(value),
    }));
    const options = {
      width: Math.max(200, place.clientWidth),
      height: HEIGHT,
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
      axes: [
        { ...axis, size: 28, gap: 2, values: (u, values) => values.map((v) => (Number.isInteger(v) ? short(v) : "")) },
        { ...axis, size: 56, values: (u, values) => values.map((v) => (v == null ? "" : short(v))) },
      ],
      series: [{ label: "step", value: (u, value) => digits(value) }, ...series],
      legend: { live: true },
      cursor: { drag: { x: true, y: false }, y: false },
      hooks: { draw: [marks(plot)] },
    };
    return new uPlot(options, uPlot.join(plot.parts.map((part) => [part.x, part.y])), place);
  };

  const drawn = plots.map((plot, n) => make(plot, document.getElementById(`canvas-${n}`), false));
  for (const button of document.querySelectorAll("button[data-log]")) {
    button.addEventListener("click", () => {
      const n = Number(button.dataset.log), isLog = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(isLog));
      drawn[n].destroy();
      drawn[n] = make(plots[n], document.getElementById(`canvas-${n}`), isLog);
    });
  }
  const fit = () => {
    for (const plot of drawn) {
      const width = Math.max(200, plot.root.parentElement.clientWidth);
      if (width !== plot.width) plot.setSize({ width, height: HEIGHT });
    }
  };
  addEventListener("resize", fit);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((plot) => plot.redraw(false)));
})();
