"""The look of the HTML report: light and dark by the reader's own setting; colours of the Okabe-Ito palette."""

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1b1f24; --dim: #5c6670; --line: #d5dae0; --box: #f4f6f8;
  --bad: #b3400a; --warn: #8a6500; --good: #00639c; --done: #7fa8c9; --p2p: #b07aa1; --pending: #e8743b; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --ink: #e4e7ea; --dim: #98a2ad; --line: #343a41;
  --box: #1d2126; --bad: #ff9a5c; --warn: #e6b800; --good: #6cc0f0; --done: #4c7799; --p2p: #a77bb5; --pending: #e8743b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 24px 20px 60px; }
header { border-left: 6px solid var(--bad); background: var(--box); padding: 14px 20px; border-radius: 4px; }
header.good { border-color: var(--good); }
header.undecided { border-color: var(--warn); }
h1 { font-size: 21px; line-height: 1.3; margin: 2px 0 8px; }
h2 { font-size: 16px; margin: 28px 0 8px; border-bottom: 1px solid var(--line); padding-bottom: 4px; }
.kind { font-weight: 700; letter-spacing: .03em; color: var(--bad); margin: 0; }
.good .kind { color: var(--good); }
.undecided .kind { color: var(--warn); }
p { margin: 4px 0; }
.dim, summary span { color: var(--dim); }
pre, td { font: 12.5px/1.45 ui-monospace, Menlo, Consolas, monospace; }
pre { background: var(--box); padding: 8px 12px; border-radius: 4px; overflow-x: auto; margin: 6px 0; }
section { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-size: 12px; color: var(--dim); font-weight: 600; }
th, td { padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr.culprit td { color: var(--bad); font-weight: 700; }
tr.suspect td { color: var(--warn); }
details { margin: 4px 0; }
summary { cursor: pointer; }
svg { width: 100%; min-width: 700px; font: 12px ui-monospace, Menlo, Consolas, monospace; }
svg text { fill: var(--ink); }
svg text.culprit { fill: var(--bad); font-weight: 700; }
svg text.suspect { fill: var(--warn); }
svg text.tick, svg text.stop { fill: var(--dim); font-size: 10px; }
svg line.tick { stroke: var(--line); }
svg line.stop { stroke: var(--pending); stroke-dasharray: 3 3; }
rect.done { fill: var(--done); } rect.p2p { fill: var(--p2p); } rect.pending { fill: var(--pending); fill-opacity: .8; }
span.done, span.p2p, span.pending { padding: 0 6px; border-radius: 3px; color: #14171b; }
span.done { background: var(--done); } span.p2p { background: var(--p2p); } span.pending { background: var(--pending); }
"""
