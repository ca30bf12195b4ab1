// Draws the board, and keeps it up to date. Texts are only set as text.
(() => {
  const MOST_CHOSEN = 8, FIRST = 5, MOST_PLOTS = 12, ROWS = 100, POLL_MS = 1000, READING_MS = 50, HIDDEN_MS = 10000, MOST_LINES = 3000;
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (selector) => document.querySelector(selector);
  const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
  const setAttribute = (node, name, value) => { if (node.getAttribute(name) !== value) node.setAttribute(name, value); };

  // -- numbers and times as people read them

  const two = (value) => String(Math.floor(value)).padStart(2, "0");
  const duration = (s) => {
    if (s == null || !isFinite(s) || s < 0) return "";
    if (s < 60) return `${Math.floor(s)}s`;
    if (s < 3600) return `${Math.floor(s / 60)}m ${two(s % 60)}s`;
    if (s < 86400) return `${Math.floor(s / 3600)}h ${two((s % 3600) / 60)}m`;
    return `${Math.floor(s / 86400)}d ${two((s % 86400) / 3600)}h`;
  };
  const clock = (s) => (s ? new Date(s * 1000).toLocaleString() : "");
  const rate = (r) => {
    if (!r) return "";
    const [value, unit] = r >= 1 ? [r, "s"] : r * 60 >= 1 ? [r * 60, "min"] : [r * 3600, "h"];
    return `${value >= 1000 ? whole(value) : value.toFixed(1)}/${unit}`;
  };

  // -- what is known, and what the user has chosen

  const rows = new Map();
  let version = 0, offered = 0, skew = 0, limit = ROWS, order = [], known = 0, current = null;
  const chosen = new Map(); // the colour of each chosen run
  const view = { metric: "", sort: "began", up: false, filter: "", states: [], best: "", isLog: false, smooth: 0, setting: "", chosen: null, isTime: false, isMany: false, isDiff: false };
  try { Object.assign(view, JSON.parse(sessionStorage.getItem(data.storage) ?? "{}")); } catch { /* private mode */ }
  const keep = () => {
    try { sessionStorage.setItem(data.storage, JSON.stringify(view)); } catch { /* private mode */ }
  };
  const now = () => Date.now() / 1000 + skew;
  const ago = (time) => `${duration(Math.max(0, now() - time)).split(" ")[0]} ago`;
  const isActive = (row) => row.state === "running" || row.state === "starting" || row.state === "waiting";
  const GOOD_IF_LOW = new RegExp(data.lowestIsBest, "i");
  const isLowest = () => (view.best ? view.best === "lowest" : GOOD_IF_LOW.test(view.metric));
  const curve = (row, metric = view.metric) => row.curves[metric];
  const best = (row) => { const found = curve(row); return found && (isLowest() ? found.low : found.high); };
  const setting = (row) => row.settings[view.setting];
  const latest = (row) => row.metrics[view.metric] ?? curve(row)?.last?.[1]; // an evaluation is not in each report
  const share = (row) => (row.progress ? Math.min(1, Math.max(0, row.progress[0] / row.progress[1])) : null);
  const silence = (row) => (row.reported && row.state === "running" ? now() - row.reported : 0);
  const pace = (row) => (silence(row) > Math.max(10, 5 * row.interval) ? null : row.rate);
  const left = (row) => (isActive(row) && row.progress && pace(row) ? (row.progress[1] - row.progress[0]) / pace(row) : null);
  const took = (row) => (row.began ? (isActive(row) ? now() : row.ended) - row.began : null);
  const late = (row) => {
    return silence(row) > Math.max(60, 10 * row.interval) ? `no report for ${duration(silence(row))}` : "";
  };
  const restarts = (row) => (row.attempts > 1 ? `${row.attempts - 1} restart${row.attempts > 2 ? "s" : ""}` : "");
  const note = (row) => {
    const found = [row.note, late(row)].filter(Boolean).join("; ");
    return found && row.state === "finished" && restarts(row) ? `${restarts(row)}; last failure: ${found}` : found;
  };
  const hosts = (row) => {
    const names = row.hosts.length + row.more_hosts > 1 ? `${row.hosts.length + row.more_hosts} hosts` : row.hosts[0] ?? "";
    return row.ranks ? `${row.ranks} on ${names}` : "";
  };
  const searched = (row) => {
    row.words ??= [row.name, row.state, row.script, ...row.hosts, row.note, row.text, ...row.tags.map((tag) => `#${tag}`), ...Object.entries(row.settings).map(([k, v]) => `${k}=${v}`)].join("\n").toLowerCase();
    return row.words;
  };

  // -- the columns. value: what is sorted by; text: what is shown

  const COLUMNS = [
    { key: "name", title: "Name", kind: "", up: true, value: (r) => r.name.toLowerCase() },
    { key: "state", title: "State", kind: "is-state", width: "7.4rem", narrow: "1.2rem", up: true, value: (r) => r.state },
    { key: "progress", title: "Progress", kind: "", width: "8rem", narrow: "5.6rem", value: (r) => share(r) ?? r.step },
    { key: "rate", title: "Rate", kind: "number medium", width: "5.6rem", value: pace, text: (r) => rate(pace(r)) },
    { key: "left", title: "Left", kind: "number small left", width: "5.6rem", up: true, value: left, text: (r) => duration(left(r)) },
    { key: "last", title: "Last", kind: "number", width: "6rem", narrow: "5.4rem", up: true, value: latest, text: (r) => amount(latest(r)) },
    { key: "best", title: "Best", kind: "number medium", width: "6rem", up: true, value: (r) => best(r)?.[1], text: (r) => amount(best(r)?.[1]) },
    { key: "trend", title: "Trend", kind: "medium", width: "7.5rem" },
    { key: "began", title: "Started", kind: "number medium began", width: "6.3rem", value: (r) => r.began, text: (r) => (r.began ? ago(r.began) : "") },
    { key: "took", title: "Runtime", kind: "number medium", width: "5.6rem", value: took, text: (r) => duration(took(r)) },
    { key: "hosts", title: "Ranks", kind: "wide", width: "8.2rem", value: (r) => r.ranks, text: hosts },
    { key: "setting", title: "⇅", kind: "number widest", width: "9rem", up: true, value: setting, text: (r) => String(setting(r) ?? "") },
  ];
  const column = (key) => COLUMNS.find((one) => one.key === key) ?? COLUMNS[8];
  const narrow = matchMedia("(max-width: 560px)");
  const makeHead = () => {
    const head = $("thead tr"), cols = $("colgroup");
    cols.append(el("col", null));
    const all = el("input", { type: "checkbox", id: "all", title: `Draw the first ${MOST_CHOSEN} runs, or none`, "aria-label": `Draw the first ${MOST_CHOSEN} runs, or none` });
    all.addEventListener("change", () => setChosen(chosen.size ? [] : order.slice(0, MOST_CHOSEN)));
    head.append(el("th", { class: "choose", scope: "col" }, el("label", null, all)));
    for (const one of COLUMNS) {
      const button = el("button", { type: "button", title: one.value ? `Sort by ${one.title.toLowerCase()}` : null }, one.title);
      button.disabled = !one.value;
      button.addEventListener("click", () => {
        view.up = view.sort === one.key ? !view.up : Boolean(one.up);
        view.sort = one.key;
        reorder();
      });
      head.append(el("th", { class: one.kind, scope: "col", "data-key": one.key }, button));
      cols.append(el("col", { class: one.kind }));
    }
    const menu = el("select", { id: "setting", "aria-label": "The setting in this column" });
    menu.addEventListener("change", () => { view.setting = menu.value; reorder(); });
    head.lastChild.prepend(menu);
    setWidths();
    narrow.addEventListener("change", setWidths);
  };
  const setWidths = () => {
    const [choose, ...others] = $("colgroup").children;
    choose.style.width = "2rem";
    others.forEach((col, n) => { col.style.width = (narrow.matches && COLUMNS[n].narrow) || COLUMNS[n].width || "auto"; });
  };

  // -- the rows

  const nodes = new Map(); // the element of each run that is in the table
  const svg = (tag) => document.createElementNS("http://www.w3.org/2000/svg", tag);
  const makeRow = (row) => {
    const box = el("input", { type: "checkbox", tabindex: "-1", "aria-label": `Draw the curve of ${row.name}` });
    box.addEventListener("change", () => choose(row.name));
    const made = el("tr", { tabindex: "-1" }, el("td", { class: "choose" }, el("label", null, box)));
    made.box = box;
    made.addEventListener("mouseenter", () => highlight(row.name));
    made.addEventListener("mouseleave", () => highlight(null));
    made.addEventListener("focusin", () => { if (current !== row.name) focusRow(row.name); });
    for (const one of COLUMNS) {
      const cell = el(one.key === "name" ? "th" : "td", { class: one.kind, scope: one.key === "name" ? "row" : null });
      if (one.key === "name") {
        cell.title = row.name;
        made.hint = el("span", { class: "hint" });
        made.reason = el("span", { class: "reason" });
        cell.append(row.name, made.hint, made.reason);
      }
      if (one.key === "progress") {
        made.bar = el("i");
        made.share = el("b");
        made.track = el("span", null, made.bar);
        cell.append(el("div", { class: "progress" }, made.track, made.share));
      }
      if (one.key === "trend") {
        made.line = svg("polyline");
        const drawn = svg("svg");
        drawn.setAttribute("viewBox", "0 -1 100 22");
        drawn.setAttribute("preserveAspectRatio", "none");
        drawn.setAttribute("aria-hidden", "true");
        drawn.append(made.line);
        cell.append(drawn);
      }
      made.append(cell);
    }
    made.addEventListener("click", (event) => {
      if (event.target.closest(".choose")) return;
      focusRow(row.name);
      open(row.name);
    });
    return made;
  };
  const sparkline = (found) => {
    if (!found || found.x.length < 2) return "";
    const first = found.x[0], width = found.x.at(-1) - first || 1, low = Math.min(...found.y), height = Math.max(...found.y) - low || 1;
    return found.x.map((x, n) => `${(((x - first) / width) * 100).toFixed(1)},${(20 - ((found.y[n] - low) / height) * 20).toFixed(1)}`).join(" ");
  };
  const drawTimes = (row, made) => {
    for (const [n, one] of COLUMNS.entries()) if (one.text) setText(made.children[n + 1], one.text(row));
    const state = made.children[2];
    setAttribute(state, "class", `state is-state ${row.state}${isActive(row) && note(row) ? " noted" : ""}`);
    setText(made.hint, row.unread > 1e6 ? "still being read" : note(row) ? "" : restarts(row));
    const told = [row.tags, row.text, note(row)], key = JSON.stringify(told);
    if (made.told !== key) {
      made.told = key;
      made.reason.replaceChildren(...row.tags.map((tag) => el("i", null, tag)), ...[row.text, note(row)].filter(Boolean).map((text) => el("span", null, text)));
      made.reason.title = [row.text, note(row)].filter(Boolean).join("\n");
      made.classList.toggle("told", made.reason.childNodes.length > 0);
    }
    setAttribute(made.querySelector(".began"), "title", clock(row.began));
    setAttribute(state, "title", note(row) ? `${row.state}: ${note(row)}` : row.state);
  };
  const drawRow = (row) => {
    const made = nodes.get(row.name);
    if (!made) return;
    const colour = chosen.get(row.name), part = share(row);
    for (let n = 0; n < MOST_CHOSEN; n++) made.classList.toggle(`own${n}`, n === colour);
    setAttribute(made, "aria-selected", String(current === row.name));
    made.box.checked = colour != null;
    setText(made.children[2], row.state);
    made.track.hidden = part == null;
    if (part != null) made.bar.style.width = `${(part * 100).toFixed(1)}%`;
    setText(made.share, part != null ? `${Math.floor(part * 100)}%` : row.step ? `step ${whole(row.step)}` : "");
    setAttribute(made.track, "class", isActive(row) ? "active" : "");
    setAttribute(made.children[3], "title", row.progress ? `${whole(row.progress[0])} of ${whole(row.progress[1])}` : row.step ? `step ${whole(row.step)}` : "");
    const found = curve(row);
    if (made.drawn !== found) setAttribute(made.line, "points", sparkline((made.drawn = found)));
    drawTimes(row, made);
  };
  const compare = (a, b) => {
    const { value } = column(view.sort), [x, y] = [value(a), value(b)];
    const lacks = (v) => v == null || v === "" || (typeof v !== typeof (x ?? y) && typeof v === "string");
    if (lacks(x) || lacks(y)) return lacks(x) - lacks(y) || b.began - a.began;
    return (x < y ? -1 : x > y ? 1 : 0) * (view.up ? 1 : -1) || b.began - a.began;
  };
  const reorder = () => {
    document.body.classList.toggle("idle", ![...rows.values()].some(isActive));
    const words = view.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [...rows.values()].filter((row) => words.every((word) => searched(row).includes(word)));
    drawStates(found);
    order = found.filter((row) => !view.states.length || view.states.includes(row.state)).sort(compare).map((row) => row.name);
    for (const th of document.querySelectorAll("thead th[data-key]")) {
      if (th.dataset.key === view.sort) th.setAttribute("aria-sort", view.up ? "ascending" : "descending");
      else th.removeAttribute("aria-sort");
    }
    place();
    rechoose();
    keep();
  };
  const place = () => {
    const body = $("main > table > tbody"), wanted = order.slice(0, limit), focused = document.activeElement;
    for (const name of wanted) if (!nodes.has(name)) nodes.set(name, makeRow(rows.get(name)));
    const placed = wanted.map((name) => nodes.get(name));
    if (placed.length !== body.children.length || placed.some((node, n) => body.children[n] !== node)) {
      body.replaceChildren(...placed);
      if (focused && body.contains(focused)) focused.focus({ preventScroll: true });
    }
    const kept = new Set(wanted);
    for (const name of nodes.keys()) if (!kept.has(name)) nodes.delete(name);
    for (const name of wanted) drawRow(rows.get(name));
    const stop = nodes.get(current) ?? placed[0];
    for (const node of placed) setAttribute(node, "tabindex", node === stop ? "0" : "-1");
    const empty = $("#empty");
    empty.hidden = order.length > 0;
    setText(empty, rows.size ? "No run matches the filter." : "There are no runs here yet. They appear as they start.");
  };
  const STATES = ["running", "starting", "waiting", "finished", "failed", "killed", "stopped", "damaged"];
  const drawStates = (found) => {
    const counts = {};
    for (const row of found) counts[row.state] = (counts[row.state] ?? 0) + 1;
    const shown = STATES.filter((state) => counts[state] || view.states.includes(state));
    const place = $("#states");
    if (shown.join() !== [...place.children].map((one) => one.dataset.state).join()) {
      place.replaceChildren(...shown.map((state) => {
        const button = el("button", { type: "button", "data-state": state }, el("span", { class: `state ${state}` }, state), el("b"));
        button.addEventListener("click", () => {
          view.states = view.states.includes(state) ? view.states.filter((one) => one !== state) : [...view.states, state];
          limit = ROWS;
          isTouched = false;
          reorder();
        });
        return button;
      }));
    }
    for (const button of place.children) {
      setText(button.lastChild, whole(counts[button.dataset.state] ?? 0));
      setAttribute(button, "aria-pressed", String(view.states.includes(button.dataset.state)));
    }
  };

  // -- the plot

  const smoothed = (values) => { // as TensorBoard does: an exponential average that starts without a bias
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value == null) return value;
      sum = view.smooth * sum + value;
      weight = view.smooth * weight + 1;
      return sum / weight;
    });
  };
  let plots = [], plotted = "", isZoomed = false, isTouched = false;
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  // The curves drawn are those of the runs that the user has chosen, as far as they are in the table. The first runs of
  // the table are drawn until the user chooses some, and for a filter that hides all that were chosen.
  const rechoose = () => {
    const there = new Set(order), mine = view.chosen?.filter((name) => there.has(name));
    const isLost = view.chosen?.length && !mine.length && !isTouched && (view.filter.trim() || view.states.length);
    const wanted = new Set(mine && !isLost ? mine : order.filter((name) => curve(rows.get(name))).slice(0, FIRST));
    const before = [...chosen.keys()].join("\n");
    for (const name of chosen.keys()) if (!wanted.has(name)) chosen.delete(name);
    for (const name of wanted) {
      const used = new Set(chosen.values());
      if (!chosen.has(name)) chosen.set(name, [...Array(MOST_CHOSEN).keys()].find((n) => !used.has(n)));
    }
    $("#all").checked = chosen.size > 0;
    if (!plotted || [...chosen.keys()].join("\n") !== before) {
      for (const row of rows.values()) drawRow(row);
      drawPlot();
      refresh(version);
    }
  };
  const setChosen = (names) => {
    const there = new Set(order);
    view.chosen = [...(view.chosen ?? []).filter((name) => !there.has(name)), ...names].slice(-MOST_CHOSEN);
    isTouched = true;
    keep();
    rechoose();
  };
  const choose = (name) => setChosen(chosen.has(name) ? [...chosen.keys()].filter((one) => one !== name) : [...chosen.keys(), name]);
  const refresh = async (since) => {
    try { apply(await ask(since)); } catch { /* the next poll says so */ }
  };
  const shownMetrics = () => (view.isMany ? [view.metric, ...[...metrics].sort().filter((name) => name !== view.metric)].slice(0, MOST_PLOTS) : [view.metric]);
  const spots = (row, steps) => { // where steps are on the x axis
    if (!view.isTime) return steps;
    const { times } = row;
    let n = 1;
    return steps.map((step) => {
      while (n < times.length - 1 && times[n][0] < step) n++;
      const [[x0, t0], [x1, t1]] = [times[Math.max(0, n - 1)], times[Math.min(n, times.length - 1)]];
      return x1 > x0 ? t0 + ((t1 - t0) * Math.min(1, Math.max(0, (step - x0) / (x1 - x0)))) : t0;
    });
  };
  const drawPlot = () => {
    const place = $("#plot"), all = [...chosen.keys()].map((name) => rows.get(name)).filter(Boolean);
    const wanted = shownMetrics().map((metric) => ({ metric, runs: all.filter((row) => curve(row, metric)?.x.length && (!view.isTime || row.times.length)) })).filter(({ runs }) => runs.length);
    for (const one of wanted) {
      const curves = one.runs.map((row) => curve(row, one.metric)), xs = curves.map(({ x }, n) => spots(one.runs[n], x));
      one.isLog = view.isLog && curves.every(({ low }) => low[1] > 0);
      one.ends = xs.map((x) => x.at(-1));
      one.joined = uPlot.join(curves.map(({ y }, n) => [xs[n], smoothed(y)]));
    }
    drawDiff(all);
    const now = JSON.stringify([view.isTime, view.isMany, view.metric, wanted.map(({ metric, isLog, runs }) => [metric, isLog, runs.map(({ name }) => [name, chosen.get(name)])])]);
    if (plots.length && plotted === now) {
      plots.forEach((plot, n) => { plot.ends = wanted[n].ends; plot.setData(wanted[n].joined, !isZoomed); });
      return;
    }
    for (const plot of plots) plot.destroy();
    plotted = now;
    isZoomed = false;
    place.classList.toggle("many", view.isMany && wanted.length > 0);
    place.replaceChildren();
    if (!wanted.length) place.append(el("p", { class: "empty" }, view.metric ? `Choose runs in the table to draw their ${view.metric}.` : "No run has reported a number yet."));
    plots = wanted.map((one) => {
      const box = place.appendChild(el("div"));
      if (view.isMany) {
        const title = box.appendChild(el("button", { type: "button", title: "Show it in the table" }, one.metric));
        title.addEventListener("click", () => { $("#metric").value = one.metric; $("#metric").dispatchEvent(new Event("change")); });
      }
      return makePlot(one, box);
    });
    place.setAttribute("aria-label", `Curves of ${wanted.map(({ metric }) => metric).join(", ")}: ${all.map(({ name }) => name).join(", ")}`);
  };
  const shortNames = (runs) => { // they often begin alike
    let start = 0;
    while (runs.length > 1 && runs.every(({ name }) => name[start] === runs[0].name[start] && start < name.length - 8)) start++;
    return runs.map(({ name }) => (start > 2 ? `…${name.slice(start)}` : name));
  };
  const makePlot = ({ runs, joined, isLog, ends }, box) => {
    const labels = shortNames(runs);
    const axis = { stroke: () => color("soft"), grid: { stroke: () => color("line"), width: 1 }, ticks: { show: false } };
    const short = (v) => (v == null ? "" : Math.abs(v) >= 1e6 || (v && Math.abs(v) < 1e-3) ? v.toExponential(1) : v.toLocaleString("en", { maximumSignificantDigits: 4 }));
    const spot = (v) => (view.isTime ? duration(v) || "0s" : Number.isInteger(v) ? short(v) : "");
    const plot = new uPlot({
      ...plotSize(),
      legend: { show: !view.isMany },
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
      axes: [
        { ...axis, size: 26, gap: 2, space: view.isTime ? 90 : 50, values: (u, all) => all.map(spot) },
        { ...axis, size: 56, values: (u, all) => all.map(short) },
      ],
      series: [
        { label: view.isTime ? "time" : "step", value: (u, v) => (v == null ? "–" : view.isTime ? duration(v) : whole(v)) },
        ...runs.map(({ name }, n) => ({ label: labels[n], stroke: () => color(`c${chosen.get(name)}`), width: 1.5, spanGaps: true, points: { show: joined[0].length < 3 }, value: (u, v) => amount(v) || "–" })),
      ],
      cursor: {
        drag: { x: true, y: false }, y: false, focus: { prox: 16 }, sync: { key: "board" },
        hover: { prox: (u, n) => (u.posToVal(u.cursor.left, "x") > plot.ends[n - 1] ? 8 : Infinity) }, // no value of a curve beyond its end
      },
      focus: { alpha: 0.25 },
      hooks: { setSelect: [(u) => { isZoomed = u.select.width > 0; }] },
    }, joined, box);
    plot.ends = ends;
    plot.names = runs.map((row) => row.name);
    plot.over.addEventListener("dblclick", () => { isZoomed = false; });
    return plot;
  };
  const plotSize = () => {
    const room = Math.max(200, $("#plot").clientWidth - 20), columns = Math.max(1, Math.floor(room / 330));
    if (view.isMany) return { width: Math.floor((room - 10 * (columns - 1)) / columns), height: 170 };
    return { width: room, height: Math.round(Math.max(160, Math.min(300, innerHeight / 4))) };
  };
  const highlight = (name) => {
    for (const plot of plots) {
      const n = plot.names.indexOf(name);
      plot.setSeries(n < 0 ? null : n + 1, { focus: true });
    }
  };

  // -- the settings in which the drawn runs differ

  let compared = "";
  const drawDiff = (all) => {
    const names = [...new Set(all.flatMap((row) => Object.keys(row.settings)))].sort();
    const differ = names.filter((name) => new Set(all.map((row) => String(row.settings[name] ?? ""))).size > 1);
    const now = JSON.stringify([all.map(({ name }) => [name, chosen.get(name)]), differ.map((name) => all.map((row) => row.settings[name]))]);
    if (compared === now) return;
    compared = now;
    $("#diff").hidden = all.length < 2;
    setText($("#diff summary"), differ.length ? `${differ.length} setting${differ.length > 1 ? "s" : ""} of the drawn runs differ${differ.length > 1 ? "" : "s"}` : "The drawn runs have the same settings");
    const head = shortNames(all).map((short, n) => el("th", { class: `own${chosen.get(all[n].name)}`, scope: "col", title: all[n].name }, short));
    $("#diff table").replaceChildren(
      el("thead", null, el("tr", null, el("td"), ...head)),
      el("tbody", null, ...differ.map((name) => el("tr", null, el("th", { scope: "row" }, name), ...all.map((row) => el("td", null, String(row.settings[name] ?? "–")))))),
    );
  };

  // -- one run

  let following = new AbortController();
  const fact = (title, ...values) => (values.some(Boolean) ? [el("dt", null, title), el("dd", null, ...values)] : []);
  const facts = (row) => {
    const listed = (all, shown) => Object.entries(all).map(([name, value]) => el("span", null, `${name}=${shown(value)} `));
    const found = best(row);
    return [
      ...fact("script", row.script), ...fact("started", clock(row.began)), ...fact("runtime", duration(took(row))),
      ...fact("step", row.progress ? `${whole(row.progress[0])} of ${whole(row.progress[1])}` : row.step ? whole(row.step) : ""),
      ...fact("attempts", row.attempts > 1 ? String(row.attempts) : ""),
      ...fact("ranks", row.hosts.length ? `${row.ranks} on ${row.hosts.join(", ")}${row.more_hosts ? ` and ${row.more_hosts} more` : ""}` : ""),
      ...fact("metrics", ...listed(row.metrics, amount)),
      ...fact("best", found ? `${view.metric}=${amount(found[1])} at step ${whole(found[0])}` : ""),
      ...fact("settings", ...listed(row.settings, String)), ...fact("tags", ...row.tags.map((tag) => el("span", null, tag))), ...fact("note", row.text),
    ];
  };
  const open = (name) => {
    const row = rows.get(name), panel = $("#details"), path = `runs/${encodeURIComponent(name)}`;
    if (!row) return;
    current = name;
    const close = el("button", { type: "button", "aria-label": "Close" }, "✕");
    close.addEventListener("click", shut);
    const actions = el("p", { class: "actions" }, el("a", { href: `${path}/`, target: "_blank", rel: "noopener" }, "Page of the run ↗"));
    const answer = el("pre", { class: "answer", tabindex: "0", hidden: "" });
    const ask = async (word) => {
      answer.hidden = false;
      answer.textContent = "…";
      try {
        answer.textContent = await (await fetch(`${path}/${word}`, { method: "POST" })).text();
      } catch { answer.textContent = "The board does not answer."; }
    };
    if (isActive(row)) {
      const stacks = el("button", { type: "button", title: "Show where all ranks are" }, "Stacks");
      const stop = el("button", { type: "button", class: "danger" }, "Stop");
      stacks.addEventListener("click", () => ask("stacks"));
      stop.addEventListener("click", () => {
        if (stop.dataset.sure) { stop.disabled = true; ask("stop"); }
        else { stop.dataset.sure = "yes"; stop.textContent = "Really stop the run?"; }
      });
      stop.addEventListener("blur", () => { delete stop.dataset.sure; stop.textContent = "Stop"; });
      actions.append(stacks, stop);
    }
    const log = el("pre", { class: "log", tabindex: "0", "aria-label": "Output of the ranks" });
    panel.replaceChildren(
      el("div", { class: "head" }, el("h2", null, name), close),
      el("p", { class: "line" }), el("p", { class: `note ${row.state}` }), actions, answer, el("dl", { class: "facts" }), log,
    );
    panel.hidden = false;
    drawDetails();
    place();
    following.abort();
    following = new AbortController();
    follow(row, path, log, following.signal);
  };
  const drawDetails = () => {
    const row = rows.get(current), panel = $("#details");
    if (!row || panel.hidden) return;
    const line = panel.querySelector(".line"), found = panel.querySelector(".facts");
    line.replaceChildren(el("span", { class: `state ${row.state}` }, row.state));
    setText(panel.querySelector(".note"), note(row));
    const wanted = facts(row);
    if (wanted.map((one) => one.textContent).join("\n") !== [...found.children].map((one) => one.textContent).join("\n")) found.replaceChildren(...wanted);
    for (const button of panel.querySelectorAll(".actions button")) if (!isActive(row)) button.disabled = true;
  };
  const shut = () => {
    following.abort();
    $("#details").hidden = true;
    focusRow(current);
  };
  const follow = async (row, path, log, signal) => {
    let rest = "";
    const plain = (text) => text.replace(/\x1b\[[0-9;:]*m/g, "");
    try {
      const stream = (await fetch(`${path}/log`, { signal })).body.pipeThrough(new TextDecoderStream()).getReader();
      for (let part = await stream.read(); !part.done; part = await stream.read()) {
        const lines = (rest + part.value).split("\n"), isAtEnd = log.scrollTop + log.clientHeight > log.scrollHeight - 30;
        rest = lines.pop();
        log.append(...lines.map((line) => JSON.parse(line)).map(([, rank, text]) => `${row.ranks > 1 ? `[rank ${rank}] ` : ""}${plain(text)}\n`));
        while (log.childNodes.length > MOST_LINES) log.firstChild.remove();
        if (isAtEnd) log.scrollTop = log.scrollHeight;
      }
      if (!log.textContent) log.textContent = "The ranks have printed nothing, or their logs are not on this machine.";
    } catch (error) {
      if (!signal.aborted) log.append("\nThe output can no longer be followed; open the run again.\n");
    }
  };

  // -- keys

  const focusRow = (name) => {
    const before = nodes.get(current);
    current = rows.has(name) ? name : order[0];
    if (before) setAttribute(before, "tabindex", "-1");
    const node = nodes.get(current);
    for (const one of [before, node]) if (one) setAttribute(one, "aria-selected", String(one === node));
    if (!node) return;
    node.setAttribute("tabindex", "0");
    node.focus({ preventScroll: true });
    node.scrollIntoView({ block: "nearest" });
  };
  const move = (by) => {
    const at = order.indexOf(current), next = Math.max(0, Math.min(order.length - 1, at < 0 ? 0 : at + by));
    if (next >= limit) { limit = next + ROWS; place(); }
    focusRow(order[next]);
    if (!$("#details").hidden) open(order[next]);
  };
  addEventListener("keydown", (event) => {
    const { key } = event, isTyping = event.target.closest("input[type=search], select");
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (key === "Escape" && !$("#details").hidden) shut();
    else if (key === "Escape" && isTyping) focusRow(current);
    else if (key === "/" && !isTyping) $("#filter").focus();
    else if (isTyping || event.target.closest("#details, button, a")) return;
    else if (key === "ArrowDown" || key === "j") move(1);
    else if (key === "ArrowUp" || key === "k") move(-1);
    else if (key === "PageDown") move(20);
    else if (key === "PageUp") move(-20);
    else if (key === "Home") move(-Infinity);
    else if (key === "End") move(Infinity);
    else if (key === " " && current) choose(current);
    else if (key === "Enter" && current) { open(current); $("#details").focus(); }
    else return;
    event.preventDefault();
  });

  // -- what comes from the server

  const setStatus = (kind, text) => {
    setAttribute($("#status"), "class", kind);
    setText($("#status"), text);
  };
  const apply = (found) => {
    const before = rows.size, there = new Set(found.runs);
    let isNew = false, isDrawn = false;
    for (const name of rows.keys()) if (!there.has(name)) isNew = rows.delete(name);
    for (const row of found.rows) {
      const old = rows.get(row.name);
      isNew ||= !old || old.state !== row.state;
      isDrawn ||= chosen.has(row.name) && JSON.stringify(old?.curves) !== JSON.stringify(row.curves);
      rows.set(row.name, row);
    }
    version = found.version;
    skew = found.now - Date.now() / 1000;
    drawMetrics(found.rows);
    drawSettings(found.rows);
    if (isNew || rows.size !== before) reorder();
    else for (const row of found.rows) drawRow(row);
    rechoose();
    if (isDrawn) drawPlot();
  };
  const metrics = new Set();
  const mostCommon = (runs) => {  // a loss is preferred
    const score = (name) => runs.filter((run) => typeof run.metrics[name] === "number").length * (/loss/i.test(name) ? 2 : 1);
    return [...metrics].sort((one, other) => score(other) - score(one))[0] ?? "";
  };
  const settings = new Set();
  const drawSettings = (changed) => {
    for (const row of changed) for (const name of Object.keys(row.settings)) settings.add(name);
    const differs = (name) => new Set([...rows.values()].map((row) => String(row.settings[name]))).size > 1;
    if (!settings.has(view.setting)) view.setting = [...settings].find(differs) ?? "";
    if (settings.size !== offered) $("#setting").replaceChildren(...[...settings].sort().map((name) => el("option", { value: name }, name)));
    offered = settings.size;
    $("#setting").value = view.setting;
  };
  const drawMetrics = (changed) => {
    for (const row of changed) for (const [name, value] of Object.entries(row.metrics)) if (typeof value === "number") metrics.add(name);
    if (!view.metric) view.metric = mostCommon(changed);
    if (view.metric) metrics.add(view.metric);
    if (metrics.size !== known) {
      known = metrics.size;
      $("#metric").replaceChildren(...[...metrics].sort().map((name) => el("option", { value: name }, name)));
    }
    $("#metric").value = view.metric;
    setText($("#best"), `best: ${isLowest() ? "lowest" : "highest"}`);
  };
  const ask = async (since) => {
    const { metric } = view, drawn = [...chosen.keys()].map((name) => ["run", name]);
    const answer = await fetch(`data?${new URLSearchParams([["since", since], ...shownMetrics().map((name) => ["metric", name]), ...drawn])}`);
    if (answer.status === 403) throw new Error("This board has ended");
    const found = await answer.json();
    return metric === view.metric || !metric ? found : ask(0); // it was changed meanwhile
  };
  let ticks = 0;
  const poll = async () => {
    try {
      apply(await ask(version));
      setStatus("live", "live");
    } catch (error) {
      setStatus("lost", error.message === "This board has ended" ? error.message : "Not connected; trying again");
    }
    ticks += 1;
    for (const name of order.slice(0, limit)) {
      const row = rows.get(name);
      if (nodes.has(name) && (isActive(row) || ticks % 30 === 0)) drawTimes(row, nodes.get(name));
    }
    drawDetails();
    const isBehind = [...rows.values()].some((row) => row.unread);
    setTimeout(poll, document.hidden ? HIDDEN_MS : isBehind ? READING_MS : POLL_MS);
  };

  // -- the beginning

  setText($("#storage"), data.storage);
  document.title = `${data.storage.split("/").at(-1)} - distrain board`;
  makeHead();
  $("#filter").value = view.filter;
  $("#filter").addEventListener("input", (event) => { view.filter = event.target.value; limit = ROWS; isTouched = false; reorder(); });
  $("#metric").addEventListener("change", async (event) => {
    view.metric = event.target.value;
    view.best = "";
    await refresh(0);
    drawMetrics([]);
    reorder();
    drawPlot();
  });
  $("#best").addEventListener("click", () => {
    view.best = isLowest() ? "highest" : "lowest";
    drawMetrics([]);
    reorder();
  });
  $("#smooth").value = view.smooth;
  $("#smooth").addEventListener("input", (event) => { view.smooth = Number(event.target.value); keep(); drawPlot(); });
  for (const [id, key] of [["log", "isLog"], ["time", "isTime"], ["many", "isMany"]]) {
    const button = $(`#${id}`);
    button.setAttribute("aria-pressed", String(view[key]));
    button.addEventListener("click", () => {
      view[key] = !view[key];
      button.setAttribute("aria-pressed", String(view[key]));
      keep();
      drawPlot();
      refresh(version);
    });
  }
  $("#diff").open = view.isDiff;
  $("#diff").addEventListener("toggle", () => { view.isDiff = $("#diff").open; keep(); });
  new IntersectionObserver((seen) => {
    if (seen.some((one) => one.isIntersecting) && limit < order.length) { limit += ROWS; place(); }
  }, { rootMargin: "600px" }).observe($("#more"));
  addEventListener("resize", () => { for (const plot of plots) plot.setSize(plotSize()); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const plot of plots) plot.redraw(false); });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) for (const row of rows.values()) drawRow(row); });
  const begin = async () => {
    try {
      apply(await ask(0));
      if (rows.size && ![...rows.values()].some(curve)) apply(await ask(0)); // another metric was sent
    } catch { /* poll() says so */ }
    poll();
  };
  begin();
})();
