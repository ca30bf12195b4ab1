// Draws the page from the object in #data. Texts are only set as text, so nothing in them becomes an element.
(() => {
  const HEIGHT = 210;
  const data = JSON.parse(document.getElementById("data").textContent);

  // -- what sections are made of

  const note = (text) => el("p", { class: "note" }, text);
  const lines = (texts) => el("pre", { tabindex: "0" }, texts.join("\n"));
  const fold = (title, ...children) => el("details", null, el("summary", null, title), ...children);
  const table = (caption, found) => {
    if (!found) return null;
    const kind = (n) => (found.numbers.includes(n) ? { class: "number" } : null);
    const row = (cells) => el("tr", null, ...cells.map((cell, n) => el(n ? "td" : "th", kind(n) ?? (n ? {} : { scope: "row" }), cell)));
    const head = el("tr", null, ...found.head.map((text, n) => el("th", { scope: "col", ...kind(n) }, text)));
    const whole = el("table", null, el("caption", null, caption), el("thead", null, head), el("tbody", null, ...found.rows.map(row)));
    const more = found.more > 0 ? note(`${found.more} more are in the files of the run.`) : null;
    return el("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" }, whole, more);
  };
  const section = (id, title, ...children) => {
    const content = children.filter((child) => child != null);
    if (!content.length) return;
    const heading = el("h2", { id: `${id}-heading` }, title);
    document.querySelector("main").append(el("section", { id, "aria-labelledby": `${id}-heading` }, heading, ...content));
    document.querySelector("nav ul").append(el("li", null, el("a", { href: `#${id}` }, title)));
  };

  // -- the curves

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const digits = (value) => (value == null ? "–" : String(Number(value.toPrecision(6))));
  const short = (value) => {
    const size = Math.abs(value);
    if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
    return value.toLocaleString("en", { maximumSignificantDigits: 5 });
  };
  // Dashed lines where attempts began, and red marks at the edge for values that are not finite numbers.
  const marks = (curve) => (u) => {
    const { ctx, bbox } = u, ratio = devicePixelRatio, bottom = bbox.top + bbox.height;
    ctx.save();
    ctx.strokeStyle = color("soft");
    ctx.lineWidth = ratio;
    ctx.setLineDash([4 * ratio, 4 * ratio]);
    ctx.beginPath();
    for (const step of data.starts) {
      const x = u.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bottom);
    }
    ctx.stroke();
    ctx.fillStyle = color("mark");
    for (const [step, value] of curve.marks) {
      const top = value === "inf", y = top ? bbox.top : bottom, x = u.valToPos(step, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, y + (top ? 9 : -9) * ratio);
      ctx.lineTo(x - 5 * ratio, y);
      ctx.lineTo(x + 5 * ratio, y);
      ctx.fill();
    }
    ctx.restore();
  };
  // uPlot's own distances between labels end at 5e32, and a diverging loss does not.
  const FAR = Array.from({ length: 846 }, (_, i) => [1, 2, 5][i % 3] * 10 ** (25 + Math.floor(i / 3)));
  const draw = (curve, place, isLog) => {
    const isFar = curve.y.some((value) => Math.abs(value) > 1e30);
    const axis = { stroke: () => color("soft"), grid: { stroke: () => color("line"), width: 1 }, ticks: { show: false } };
    const options = {
      width: Math.max(200, place.clientWidth),
      height: HEIGHT,
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
      axes: [
        { ...axis, size: 28, gap: 2, values: (u, values) => values.map((v) => (Number.isInteger(v) ? short(v) : "")) },
        { ...axis, size: 56, incrs: isFar ? FAR : undefined, values: (u, values) => values.map((v) => (v == null ? "" : short(v))) },
      ],
      series: [
        { label: "report", value: (u, value) => digits(value) },
        { label: "value", stroke: () => color("curve"), width: 1.5, points: { show: curve.x.length < 3, size: 6 }, value: (u, value) => digits(value) },
      ],
      cursor: { drag: { x: true, y: false }, y: false },
      hooks: { draw: [marks(curve)] },
    };
    return new uPlot(options, withGaps(curve), place);
  };
  // A line has a gap where a value is not finite, unless so many points are left out that it would vanish.
  const withGaps = ({ x, y, count, marks }) => {
    if (count > x.length + marks.length) return [x, y];
    const points = [...x.map((step, n) => [step, y[n]]), ...marks.map(([step]) => [step, null])].sort((a, b) => a[0] - b[0]);
    return [points.map(([step]) => step), points.map(([, value]) => value)];
  };
  const summary = ({ count, nonfinite, marks, first, last, low, high }) => {
    const at = ([step, value]) => `${amount(value)} at report ${whole(step)}`;
    const parts = [`${whole(count)} value${count === 1 ? "" : "s"}`];
    if (first) parts.push(`first ${amount(first[1])}`, `last ${amount(last[1])}`, `lowest ${at(low)}`, `highest ${at(high)}`);
    if (marks.length) parts.push(`${whole(nonfinite)} not finite, the first (${marks[0][1]}) at report ${whole(marks[0][0])}`);
    return parts.join("; ");
  };
  const plots = [];
  const figure = (curve) => {
    const place = el("div", { class: "plot", role: "img", "aria-label": `Curve of ${curve.name}. ${summary(curve)}` });
    const plot = { curve, place };
    plots.push(plot);
    const button = curve.low?.[1] > 0 ? el("button", { type: "button", "aria-pressed": "false" }, "log scale") : null;
    button?.addEventListener("click", () => {
      const isLog = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(isLog));
      plot.drawn.destroy();
      plot.drawn = draw(curve, place, isLog);
    });
    const head = el("div", { class: "plot-head" }, el("h3", null, curve.name), button);
    return el("figure", { "aria-label": curve.name }, head, place, el("figcaption", null, summary(curve)));
  };

  // -- the page

  const failed = data.failures.flatMap((one) => [
    el("h3", null, one.rank, one.role ? ` (${one.role})` : null),
    el("p", null, one.why),
    one.traceback ? lines([one.traceback.trimEnd()]) : null,
    one.lines.length ? fold("Last lines of its output", lines(one.lines)) : null,
  ]);
  const message = data.message ? lines([data.message]) : null;
  const bar = el("div", { class: "bar", "aria-hidden": "true" });
  for (const [kind, share] of data.time?.parts ?? []) {
    const part = el("span", { class: `part-${kind}`, title: kind });
    part.style.flexGrow = share;
    bar.append(part);
  }

  document.querySelector(".verdict").prepend(el("strong", { class: `state ${data.state}` }, data.state), " ");
  document.querySelector("header").append(el("p", { class: "location" }, data.location));
  document.querySelector("main").append(...data.notes.map((text) => el("p", { class: "warning" }, `Note: ${text}`)));
  section("failure", data.state === "stopped" ? "End" : "Failure", ...failed, message && failed.length ? fold("The whole message", message) : message,
    ...(data.where.length ? [el("h3", null, "Where the other ranks were"), lines(data.where)] : []));
  section("metrics", "Metrics of rank 0",
    data.curves.length ? el("div", { class: "plots" }, ...data.curves.map(figure)) : note("Rank 0 has reported no numbers."),
    data.starts.length ? note("Dashed lines mark the reports at which later attempts began.") : null,
    data.more_metrics ? note(`${data.more_metrics} more metrics are in metrics.jsonl.`) : null);
  section("ranks", "Ranks", table("Ranks, those first that are behind", data.ranks));
  const files = data.evidence.map((name) => el("li", null, el("a", { href: `evidence/${name}` }, name)));
  section("attempts", "Attempts", table("Attempts, the last one first", data.attempts),
    files.length ? fold("Evidence of hangs and failures, in the run directory", el("ul", null, ...files)) : null);
  section("events", "Hangs, slow ranks and other events", table("Events, the last one first", data.events));
  section("checkpoints", "Checkpoints", table("Checkpoints, the last one first", data.checkpoints));
  const times = data.time && table("Where the time went", data.time.table);
  times?.querySelectorAll("tbody th").forEach((th, n) => th.prepend(el("i", { class: `key part-${data.time.parts[n][0]}` })));
  if (data.time) section("time", "Where the time went", el("p", null, `Goodput: ${data.time.goodput}`), bar, times);
  section("logs", "Last lines of the logs", ...data.logs.map(([title, texts]) => fold(title, lines(texts))));
  section("settings", "Settings and versions", ...data.settings.map(([title, found]) => fold(title, table(title, found))));
  document.querySelector("footer").append(`Written ${data.made} by distrain ${data.version}. The curves are drawn by uPlot (MIT licence, in the source of this page).`);

  for (const plot of plots) plot.drawn = draw(plot.curve, plot.place, false);
  addEventListener("resize", () => {
    for (const { drawn, place } of plots) drawn.setSize({ width: Math.max(200, place.clientWidth), height: HEIGHT });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach(({ drawn }) => drawn.redraw(false)));
})();
