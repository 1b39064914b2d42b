"""The page's stylesheet, for light and dark: colours as variables, everything else once."""

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #f6f7f9; --card: #ffffff; --edge: #e3e6eb; --text: #161a22; --quiet: #667085; --faint: #eef0f4;
  --a: #3056d3; --b: #0e9384; --c: #c4620a; --bad: #c8321f; --glow: rgba(48, 86, 211, .13);
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #0e1117; --card: #161b24; --edge: #262d3a; --text: #e8ebf1; --quiet: #8f9bb0; --faint: #1d2430;
    --a: #7c9cff; --b: #3ccbb8; --c: #f0a35c; --bad: #ff7a6b; --glow: rgba(124, 156, 255, .16);
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 34px; line-height: 1.15; letter-spacing: -.02em; margin: 0 0 6px; }
h2 { font-size: 19px; letter-spacing: -.01em; margin: 40px 0 12px; }
h3 { font-size: 14px; margin: 0; }
p { margin: 0 0 8px; } code { font-family: ui-monospace, "SF Mono", "DejaVu Sans Mono", monospace; font-size: .92em; }
.kicker { color: var(--a); font-weight: 650; font-size: 13px; letter-spacing: .06em; text-transform: uppercase; }
.sub { color: var(--quiet); overflow-wrap: anywhere; } .sub b { color: var(--text); font-weight: 600; }
.verdict { margin: 20px 0 0; padding: 14px 18px; border-left: 4px solid var(--a); background: var(--glow);
  border-radius: 0 10px 10px 0; font-size: 16px; }
.keys { display: flex; flex-wrap: wrap; gap: 14px; margin-top: 22px; } .keys .card { flex: 1 1 215px; }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 14px; padding: 16px 18px; min-width: 0; }
.key .name { color: var(--quiet); font-size: 13px; } .key .more { color: var(--quiet); font-size: 13px; }
.key .big { font-size: 31px; line-height: 1.2; font-weight: 680; letter-spacing: -.02em; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.key .big small { font-size: 15px; font-weight: 500; color: var(--quiet); letter-spacing: 0; }
.key.first { background: linear-gradient(140deg, var(--glow), transparent 75%), var(--card); }
.key.wrong .big { color: var(--bad); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 470px), 1fr)); gap: 14px; }
.three { grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); }
.plot header { display: flex; justify-content: space-between; gap: 12px; flex-wrap: wrap; margin-bottom: 6px; }
.legend { color: var(--quiet); font-size: 12.5px; display: flex; gap: 12px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px; }
svg { width: 100%; height: auto; display: block; overflow: visible; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--quiet);
  font-variant-numeric: tabular-nums; }
svg .title { font-size: 12px; } svg .value { fill: var(--text); font-weight: 650; }
svg .note { font-size: 11px; } svg .grid { stroke: var(--edge); } svg .axis, svg .stub { stroke: var(--quiet); }
svg .mark { stroke: var(--quiet); stroke-dasharray: 3 4; opacity: .7; }
svg .line { fill: none; stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round; }
svg .area { stroke: none; opacity: .14; } svg .failure { stroke: var(--bad); stroke-width: 1.5; }
svg .line.a { stroke: var(--a); } svg .line.b { stroke: var(--b); } svg .line.c { stroke: var(--c); }
svg .dashed { stroke-dasharray: 5 5; }
svg .area.a, svg .dot.a { fill: var(--a); } svg .dot.b, svg .area.b { fill: var(--b); }
svg .dot.c, svg .area.c { fill: var(--c); } svg .cloud { opacity: .5; }
svg .best { fill: var(--card); stroke: var(--a); stroke-width: 3.5; }
.bar { height: 12px; border-radius: 6px; background: var(--faint); overflow: hidden; margin: 8px 0; }
.bar i { display: block; height: 100%; background: var(--a); border-radius: 6px; }
.wide { overflow-x: auto; padding: 6px 18px; } table { border-collapse: collapse; width: 100%; }
th, td { padding: 9px 14px 9px 0; text-align: right; border-bottom: 1px solid var(--edge); white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th { color: var(--quiet); font-weight: 500; font-size: 13px; } tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; } td.text { white-space: normal; text-align: left;
  overflow-wrap: anywhere; } tr.best td { font-weight: 680; color: var(--a); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 14px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 16px; margin: 8px 0 0; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
ul.notes { margin: 0; padding: 0 0 0 18px; } ul.notes li { margin: 3px 0; }
footer { color: var(--quiet); font-size: 13px; margin-top: 36px; }
@media print { body { background: #fff; } .card { break-inside: avoid; } }
"""
