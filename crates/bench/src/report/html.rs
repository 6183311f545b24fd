//! The HTML page: a table, the charts, and a short script for tooltips and sorting. It loads no other file.

use std::fmt::Write;

use super::charts::Chart;
use super::results::{COLUMNS, RunResult, row};
use super::svg::{self, escape};

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1280px;padding:0 1rem;color:#282c34;background:#fff}
h1{font-size:1.5rem}svg{max-width:100%;height:auto}svg text{font:12px system-ui,sans-serif}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(520px,1fr));gap:1rem}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .7rem;border-bottom:1px solid #e0e3e8;text-align:right;white-space:nowrap}
th{cursor:pointer}th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}
#tip{position:fixed;background:#282c34;color:#fff;padding:.2rem .5rem;border-radius:4px;font-size:13px;display:none}";

const SCRIPT: &str = "\
const tip=document.getElementById('tip');
document.querySelectorAll('[data-tip]').forEach(dot=>{
  dot.addEventListener('mousemove',event=>{tip.textContent=dot.dataset.tip;tip.style.display='block';
    tip.style.left=event.clientX+12+'px';tip.style.top=event.clientY+12+'px'});
  dot.addEventListener('mouseleave',()=>tip.style.display='none')});
document.querySelectorAll('th').forEach((head,column)=>{let up=false;head.addEventListener('click',()=>{up=!up;
  const body=head.closest('table').tBodies[0];const cell=row=>row.cells[column].textContent;
  [...body.rows].sort((a,b)=>(up?1:-1)*cell(a).localeCompare(cell(b),undefined,{numeric:true}))
    .forEach(row=>body.append(row))})});";

pub fn page(title: &str, runs: &[RunResult], charts: &[Chart]) -> String {
    let mut page = begin(title);
    page.push_str("<table><thead><tr>");
    for column in COLUMNS {
        let _ = write!(page, "<th>{}</th>", escape(column));
    }
    page.push_str("</tr></thead><tbody>\n");
    for run in runs {
        page.push_str("<tr>");
        for cell in row(run) {
            let _ = write!(page, "<td>{}</td>", escape(&cell));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody></table>\n<p>Latencies in milliseconds.</p>\n");
    finish(&mut page, charts);
    page
}

/// The same with tables that are text already.
pub fn text_page(title: &str, text: &str, charts: &[Chart]) -> String {
    let mut page = begin(title);
    let _ = writeln!(page, "<pre>{}</pre>", escape(text));
    finish(&mut page, charts);
    page
}

fn begin(title: &str) -> String {
    let title = escape(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\n\
         <meta name=\"viewport\" content=\"width=device-width\"><style>{STYLE}</style></head>\n\
         <body><h1>{title}</h1>\n"
    )
}

fn finish(page: &mut String, charts: &[Chart]) {
    page.push_str("<div class=\"charts\">\n");
    for chart in charts {
        page.push_str(&svg::write(&chart.scene));
    }
    let _ = write!(page, "</div><div id=\"tip\"></div>\n<script>{SCRIPT}</script></body></html>\n");
}
