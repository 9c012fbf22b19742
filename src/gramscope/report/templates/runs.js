"use strict";
// Several runs: a table that sorts and filters, a measure against a setting, and small drawings of one measure.
// `page` lends what page.js has: data(), hidden (a Set of run indices), element, colour, css, text, short, said, save.
const gramscopeRuns = (page) => {
  const byId = (id) => document.getElementById(id);
  const state = { sort: null, down: false, opened: new Set(), all: false, filter: "", x: null, y: null };
  const table = () => page.data().table;
  const column = (key) => table().columns.find((each) => each.key === key);
  const many = () => Boolean(byId("against"));
  const known = (value) => value !== null && value !== undefined;

  // Filter: words anywhere in the row, or a column with a condition.
  const condition = /^(.+?)(<=|>=|!=|=|<|>)(.*)$/;
  const tests = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b, "=": (a, b) => a === b, "!=": (a, b) => a !== b };

  function term(written) {
    const parts = condition.exec(written), named = parts && table().columns.find((each) => each.key.toLowerCase() === parts[1].toLowerCase());
    if (!named) return (run) => table().columns.some((each) => known(each.cells[run]) && String(each.cells[run]).toLowerCase().includes(written.toLowerCase()));
    const [, , operator, wanted] = parts;
    if (named.numeric) return (run) => known(named.cells[run]) && tests[operator](named.cells[run], Number(wanted));
    const [a, b] = [(run) => String(named.cells[run] ?? "").toLowerCase(), wanted.toLowerCase()];
    return (run) => tests[operator](a(run), b);
  }

  // A name with blanks ("last step>3") is one term: blanks before an operator do not part it.
  function terms(written) {
    const names = table().columns.map((each) => each.key).filter((key) => key.includes(" ")).sort((a, b) => b.length - a.length);
    let rest = written;
    const held = [];
    for (const name of names) rest = rest.replaceAll(name, () => `\u0001${held.push(name) - 1}\u0001`);
    return rest.replace(/\s*(<=|>=|!=|=|<|>)\s*/g, "$1").split(/\s+/).filter(Boolean).map((each) => term(each.replace(/\u0001(\d+)\u0001/g, (_, place) => held[place])));
  }

  function matching() {
    const wanted = terms(state.filter);
    return [...column("run").cells.keys()].filter((run) => wanted.every((holds) => holds(run)));
  }

  function sorted(runs) {
    const by = state.sort && column(state.sort);
    if (!by) return runs;
    const order = (a, b) => (by.numeric ? a - b : String(a).localeCompare(String(b), "en", { numeric: true })) * (state.down ? -1 : 1);
    return [...runs].sort((a, b) => (known(by.cells[a]) - known(by.cells[b]) ? known(by.cells[b]) - known(by.cells[a]) : known(by.cells[a]) ? order(by.cells[a], by.cells[b]) : 0));
  }

  function heading(each) {
    const cell = page.element("th"), button = page.element("button", each.key, "sort");
    cell.scope = "col";
    cell.className = each.numeric ? "number" : "";
    button.type = "button";
    button.addEventListener("click", () => {
      state.down = state.sort === each.key ? !state.down : each.numeric && each.group !== "setting";
      state.sort = each.key;
      draw();
      byId("runs-table").querySelectorAll("button.sort").forEach((other) => { if (other.textContent === each.key) other.focus(); });
    });
    if (state.sort === each.key) { cell.setAttribute("aria-sort", state.down ? "descending" : "ascending"); button.append(state.down ? " ↓" : " ↑"); }
    cell.append(button);
    return cell;
  }

  function body(run, each) {
    if (each.key === "run") {
      const cell = page.element("th"), button = page.element("button", each.cells[run], "open-run");
      cell.scope = "row";
      button.type = "button";
      button.setAttribute("aria-expanded", String(state.opened.has(run)));
      button.addEventListener("click", () => open(run));
      if (!many()) cell.append(page.element("span", "", `swatch swatch-${run % 16}`), " ");
      cell.append(button);
      return cell;
    }
    const cell = page.element("td", page.said(each.cells[run]), each.numeric ? "number" : "");
    if (each.key === "verdict" && many()) {
      const dot = page.element("span", "", "swatch");
      dot.style.background = page.colour(["c", page.data().colours[each.cells[run]]]);
      cell.prepend(dot, " ");
    }
    return cell;
  }

  function open(run) {
    if (many()) {
      if (state.opened.has(run)) state.opened.delete(run); else state.opened.add(run);
      cards();
      fill();
    }
    const card = document.querySelector(`article[data-of-run="${run}"]`);
    if (card && !card.hidden) card.scrollIntoView({ block: "nearest" });
  }

  function cards() {
    document.querySelectorAll("article[data-of-run]").forEach((node) => {
      const run = Number(node.dataset.ofRun);
      node.hidden = many() ? !state.opened.has(run) : page.hidden.has(run);
    });
    if (byId("no-card")) byId("no-card").hidden = state.opened.size > 0;
  }

  function fill() {
    const shown = sorted(matching()), columns = table().columns.filter((each) => each.first || state.all);
    const made = page.element("table"), top = made.createTHead().insertRow(), rows = made.createTBody();
    top.append(...columns.map(heading));
    shown.forEach((run) => rows.insertRow().append(...columns.map((each) => body(run, each))));
    byId("runs-table").replaceChildren(made);
    byId("matching").textContent = state.filter ? `${shown.length} of ${column("run").cells.length} runs` : "";
    return shown;
  }

  // A measure against a setting ---------------------------------------------------------------------------------------
  function choices() {
    if (!many()) return;
    const settings = table().columns.filter((each) => each.group === "setting"), numbers = table().columns.filter((each) => each.numeric);
    const xs = [...settings, ...numbers.filter((each) => each.group !== "setting")], ys = numbers.filter((each) => each.group !== "setting");
    state.x = xs.some((each) => each.key === state.x) ? state.x : xs[0]?.key;
    state.y = ys.some((each) => each.key === state.y) ? state.y : (ys.find((each) => each.key.startsWith("final")) || ys[0])?.key;
    for (const [id, options, chosen] of [["against-x", xs, state.x], ["against-y", ys, state.y]]) {
      byId(id).replaceChildren(...options.map((each) => { const made = page.element("option", each.key); made.value = each.key; made.selected = each.key === chosen; return made; }));
    }
  }

  function logarithmic(values) {
    const low = Math.min(...values), high = Math.max(...values);
    return values.length > 1 && low > 0 && high / low > 30;
  }

  function axis(each, runs) {
    const values = runs.map((run) => each.cells[run]).filter(known), log = each.numeric && logarithmic(values);
    const made = { title: { text: page.text(each.key), font: { size: 12 } }, type: log ? "log" : each.numeric ? "linear" : "category", automargin: true,
      gridcolor: page.css("--line"), linecolor: page.css("--line"), zerolinecolor: page.css("--line"), tickfont: { size: 11 }, ...page.written(log), nticks: 8 };
    return log ? { ...made, ...page.logLabels(made, {}, values) } : made;
  }

  // The mean of the runs that share a setting, where at least one value of it is shared; else a line would say nothing.
  // What a run that diverged ended with is not what the setting gives.
  function meansOf(all, x, y) {
    const runs = all.filter((run) => column("verdict").cells[run] !== "diverged"), places = new Map();
    if (x.group !== "setting") return null;
    runs.forEach((run) => places.set(x.cells[run], [...(places.get(x.cells[run]) || []), y.cells[run]]));
    if (places.size < 2 || places.size === runs.length) return null;
    const xs = [...places.keys()].sort((a, b) => (x.numeric ? a - b : String(a).localeCompare(String(b))));
    return { x: xs, y: xs.map((value) => places.get(value).reduce((a, b) => a + b) / places.get(value).length) };
  }

  function against(runs) {
    if (!many() || !state.x || !state.y) return;
    const x = column(state.x), y = column(state.y), verdict = column("verdict").cells;
    const there = runs.filter((run) => known(x.cells[run]) && known(y.cells[run]));
    const traces = [...new Set(there.map((run) => verdict[run]))].map((word) => {
      const own = there.filter((run) => verdict[run] === word);
      return { type: "scatter", mode: "markers", name: word, x: own.map((run) => x.cells[run]), y: own.map((run) => y.cells[run]),
        text: own.map((run) => page.text(column("run").cells[run])), hovertemplate: "%{text}<br>%{x}: %{y:.4g}<extra></extra>",
        marker: { size: 9, opacity: 0.8, color: page.colour(["c", page.data().colours[word]]), symbol: page.symbol(page.data().colours[word]) } };
    });
    const means = meansOf(there, x, y);
    if (means) traces.push({ type: "scatter", mode: "lines", name: "mean", ...means, line: { color: page.css("--dim"), width: 1.5 }, hovertemplate: "mean, %{x}: %{y:.4g}<extra></extra>" });
    const lacking = runs.length - there.length;
    byId("against-lacks").textContent = lacking ? `${lacking} run${lacking > 1 ? "s lack" : " lacks"} one of the two.` : "";
    const box = byId("against-plot");
    box.style.height = "380px";
    Plotly.react(box, traces, { height: 380, margin: { l: 60, r: 12, t: 12, b: 48 }, xaxis: axis(x, there), yaxis: axis(y, there), showlegend: true, hovermode: "closest",
      legend: { orientation: "h", y: -0.2, x: 0 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: page.css("--ink"), family: "inherit", size: 12 } }, page.config);
  }

  // Small drawings, one a run, by hand: two hundred of Plotly's would take a minute --------------------------------------
  const WIDTH = 180, HEIGHT = 84, name = "http://www.w3.org/2000/svg";
  function svg(tag, attributes) {
    const made = document.createElementNS(name, tag);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    return made;
  }

  function scale(values, log, size) {
    const at = log ? (v) => (v > 0 ? Math.log10(v) : NaN) : (v) => v;
    let low = Infinity, high = -Infinity;
    for (const value of values) { const v = at(value); if (Number.isFinite(v)) { low = Math.min(low, v); high = Math.max(high, v); } }
    if (!(high > low)) { low -= 0.5; high += 0.5; }
    return { place: (v) => Math.min(1, Math.max(0, (at(v) - low) / (high - low))) * size, low: log ? 10 ** low : low, high: log ? 10 ** high : high };
  }

  function path(mark, xs, ys) {
    let drawn = "", pen = "M";
    mark.x.forEach((x, place) => {
      const a = xs.place(x), b = mark.y[place] === null ? NaN : HEIGHT - ys.place(mark.y[place]);
      if (!Number.isFinite(a) || !Number.isFinite(b)) { pen = "M"; return; }
      drawn += `${pen}${a.toFixed(1)} ${b.toFixed(1)}`;
      pen = "L";
    });
    return drawn;
  }

  function multiples(runs) {
    const box = byId("small-multiples"), panel = page.data().panels.find((each) => each.key === "all-runs");
    if (!box || !panel) return;
    const plot = panel.plots.find((each) => each.at[page.position(panel)] !== null), marks = new Map(page.frame(panel, plot).map((mark) => [mark.run, mark]));
    const there = runs.filter((run) => marks.has(run)), shown = there.map((run) => marks.get(run));
    // A run that diverged would leave the others a flat line: it is cut off at the edge.
    const sound = shown.filter((mark) => column("verdict").cells[mark.run] !== "diverged"), heights = (sound.length ? sound : shown).flatMap((mark) => mark.y).filter(known);
    const logSteps = page.logSteps(), xs = scale(shown.flatMap((mark) => mark.x), logSteps, WIDTH), ys = scale(heights, plot.y.log, HEIGHT);
    box.replaceChildren(...there.map((run) => {
      const figure = page.element("figure"), drawing = svg("svg", { viewBox: `-2 -2 ${WIDTH + 4} ${HEIGHT + 4}`, role: "img", "aria-label": `${marks.get(run).name}: ${panel.control.options[page.position(panel)]}` });
      drawing.append(svg("rect", { width: WIDTH, height: HEIGHT, class: "frame" }), svg("path", { d: path(marks.get(run), xs, ys), stroke: page.colour(marks.get(run).colour) }));
      figure.append(page.element("figcaption", marks.get(run).name), drawing);
      return figure;
    }), page.element("p", there.length ? `Each drawing: steps ${page.said(xs.low)} to ${page.said(xs.high)}, values ${page.said(ys.low)} to ${page.said(ys.high)}${plot.y.log ? ", log scale" : ""}${sound.length < shown.length ? "; runs that diverged are cut off there" : ""}.` : "No run that is shown has it.", "dim rule"));
  }

  function draw() {
    if (!table()) return;
    const shown = fill();
    against(shown);
    multiples(shown);
    cards();
  }

  // The filter hides runs everywhere; `page.redraw` draws the panels again.
  function filtered() {
    const kept = new Set(matching());
    column("run").cells.forEach((_, run) => { if (kept.has(run)) page.hidden.delete(run); else page.hidden.add(run); });
    page.redraw();
  }

  function csv() {
    const columns = table().columns;
    const lines = [columns.map((each) => each.key), ...sorted(matching()).map((run) => columns.map((each) => each.cells[run]))];
    return lines.map((line) => line.map(page.cell).join(",")).join("\r\n") + "\r\n";
  }

  function begin() {
    if (!table()) return;
    choices();
    byId("all-columns").checked = state.all;
    byId("filter").value = state.filter;
    byId("filter").addEventListener("input", (event) => { state.filter = event.target.value; filtered(); });
    byId("all-columns").addEventListener("change", (event) => { state.all = event.target.checked; fill(); });
    byId("save-table").addEventListener("click", () => page.save("runs.csv", "text/csv", csv()));
    for (const key of ["x", "y"]) byId(`against-${key}`)?.addEventListener("change", (event) => { state[key] = event.target.value; draw(); });
  }

  return { begin, draw, cards };
};
