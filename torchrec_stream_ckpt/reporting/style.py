"""The style sheet of the report."""

STYLE = """
:root{color-scheme:light dark;--bg:#ffffff;--fg:#1d2129;--dim:#5b6472;--line:#d9dee6;--card:#f5f7fa;--bad:#b3261e;
--badbg:#fdecea;--c0:#2f6fb7;--c1:#d97706;--c2:#1f9d74;--c3:#8a4fbf;--c4:#c2417c;--c5:#6d8b1f;--c6:#0f8fa8;--c7:#8b94a3}
@media (prefers-color-scheme:dark){:root{--bg:#14171c;--fg:#e6e9ee;--dim:#a0a9b7;--line:#343b46;--card:#1e232b;
--bad:#ff9a91;--badbg:#3a1f1d;--c0:#6aa5ea;--c1:#f0a04b;--c2:#4cc79c;--c3:#b98ae6;--c4:#ec7fb0;--c5:#a9c755;--c6:#4fc3d9;
--c7:#78818f}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:920px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.5rem;margin:0}
h2{font-size:1.1rem;margin:0 0 2px}
header p,section>p{margin:0 0 8px;color:var(--dim)}
.where{font-family:ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
section{margin-top:32px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(135px,1fr));gap:10px;margin:16px 0 0}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
dt{color:var(--dim);font-size:.82rem}
dd{margin:0;font-size:1.25rem;font-weight:600;overflow-wrap:anywhere}
dd small{display:block;font-size:.8rem;font-weight:400;color:var(--dim)}
.alerts{border:1px solid var(--bad);background:var(--badbg);border-radius:8px;padding:10px 14px;margin-top:16px}
.alerts h2,.alerts b{color:var(--bad)}
.alerts ul{margin:0;padding-left:18px;overflow-wrap:anywhere}
.chart,.wide{overflow-x:auto}
svg{display:block;width:100%;height:auto}
.grid{stroke:var(--line)}
.axis{stroke:var(--dim)}
.tick{fill:var(--dim);font-size:11.5px}
.lane{fill:var(--fg);font-size:12px}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.branch{stroke:var(--dim);stroke-dasharray:3 3;fill:none}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;margin:6px 0 0;padding:0;font-size:.85rem}
.legend li{display:flex;align-items:center;gap:6px;min-width:0;overflow-wrap:anywhere}
.key{flex:none;width:12px;height:12px;border-radius:3px}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:4px 10px 4px 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--dim);font-weight:500}
th:first-child,td:first-child{text-align:left}
td.name{white-space:normal;overflow-wrap:anywhere;min-width:140px}
details{margin-top:8px}
summary{cursor:pointer;color:var(--dim)}
code{white-space:nowrap}
.none{overflow-x:auto;padding:12px 14px;background:var(--card);border:1px dashed var(--line);border-radius:8px}
.legend li>span+span{min-width:0}
@media (max-width:600px){.tick,.lane{font-size:19px}
.names thead{display:none}
.names tr{display:flex;flex-wrap:wrap;gap:0 14px;border-bottom:1px solid var(--line);padding:4px 0}
.names td{border:0;padding:0}
.names td.name{flex-basis:100%;font-weight:500}
.names td[data-of]::before{content:attr(data-of) " ";color:var(--dim)}}
"""
"""Text has a contrast of at least 4.5 to 1 with its background, in both."""
