//! How all policies fare with four providers: a row per policy, a panel per figure, a dot per provider.

use std::error::Error;
use std::path::Path;

use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{AXIS, Area, BLUE, Drawn, GREEN, GRID, INK, ORANGE, PURPLE, SHADE, text};
use crate::Results;
use crate::client::Policy;
use crate::load::Load;
use crate::metrics::Figures;
use crate::provider::{Hints, Kind};
use crate::run::Cell;

const HEADING: &str = "Twenty requests to a host that throttles and does not say when to come back";

const PROVIDERS: [(Kind, &str, RGBColor); 4] = [
    (Kind::OnePerWindow, "one per 8-60 s", BLUE),
    (Kind::TokenBucket, "token bucket", GREEN),
    (Kind::FixedWindow, "N per window", ORANGE),
    (Kind::ViolationExtends, "one per 8-60 s, a refusal restarts the wait", PURPLE),
];

/// What is this crate's beside the way it comes.
const LIGHT_SHADE: RGBColor = RGBColor(240, 244, 253);

/// A policy and its figures, provider by provider.
type Row<'a> = (Policy, Vec<&'a Figures>);

struct Panel {
    heading: &'static str,
    unit: &'static str,
    figure: fn(&Figures) -> f64,
    axis: Axis,
    ticks: &'static [f64],
}

/// From the first tick to the last.
#[derive(Clone, Copy)]
enum Axis {
    Logarithmic,
    Percent,
}

const PANELS: [Panel; 3] = [
    Panel {
        heading: "time for all  (← better)",
        unit: "times that of a client that knows the host",
        figure: |figures| figures.makespan,
        axis: Axis::Logarithmic,
        ticks: &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0],
    },
    Panel {
        heading: "refusals  (← better)",
        unit: "per success",
        figure: |figures| figures.refusals,
        axis: Axis::Logarithmic,
        ticks: &[0.1, 1.0, 10.0, 100.0, 1_000.0, 10_000.0],
    },
    Panel {
        heading: "served in one go  (better →)",
        unit: "of the requests",
        figure: |figures| figures.in_one_go,
        axis: Axis::Percent,
        ticks: &[0.0, 0.25, 0.5, 0.75, 1.0],
    },
];

impl Panel {
    fn ends(&self) -> (f64, f64) {
        let (first, last) = (self.ticks[0], self.ticks[self.ticks.len() - 1]);
        (self.axis.place(first), self.axis.place(last))
    }

    fn place(&self, figures: &Figures) -> f64 {
        let (start, end) = self.ends();
        self.axis.place((self.figure)(figures)).clamp(start, end)
    }
}

impl Axis {
    fn place(self, value: f64) -> f64 {
        match self {
            Self::Logarithmic => value.log10(),
            Self::Percent => value,
        }
    }

    fn label(self, tick: f64) -> String {
        match self {
            Self::Logarithmic => format!("{tick}"),
            Self::Percent => format!("{:.0} %", tick * 100.0),
        }
    }
}

/// True when it was written: only a full comparison makes a picture.
pub(crate) fn write(file: &Path, results: &Results) -> Result<bool, Box<dyn Error>> {
    let Some(rows) = rows(results) else { return Ok(false) };
    let root = SVGBackend::new(file, (900, 560)).into_drawing_area();
    root.fill(&WHITE)?;
    root.draw(&Text::new(HEADING, (20, 14), text(18)))?;
    draw_legend(&root)?;
    let (names, panels) = root.margin(92, 8, 0, 16).split_horizontally(118);
    for (n, (panel, area)) in PANELS.iter().zip(panels.split_evenly((1, PANELS.len()))).enumerate() {
        let heights = draw(panel, &rows, &area)?;
        if n == 0 {
            draw_names(&rows, &heights, &names)?;
        }
    }
    root.present()?;
    Ok(true)
}

/// This crate's on top, the others below, those that are refused least first.
fn rows(results: &Results) -> Option<Vec<Row<'_>>> {
    let cell = |kind, policy| Cell { kind, hints: Hints::None, load: Load::Batch(20), policy };
    let row = |policy| {
        let figures: Option<Vec<_>> = PROVIDERS.iter().map(|(kind, ..)| results.get(&cell(*kind, policy))).collect();
        Some((policy, figures?))
    };
    let mut rows: Vec<Row<'_>> = Policy::ALL.into_iter().rev().map(row).collect::<Option<_>>()?;
    let magnitude = |row: &Row<'_>| row.1.iter().map(|figures| figures.refusals.ln()).sum::<f64>();
    rows.sort_by(|a, b| is_ours(b.0).cmp(&is_ours(a.0)).then(magnitude(a).total_cmp(&magnitude(b))));
    Some(rows)
}

fn is_ours(policy: Policy) -> bool {
    matches!(policy, Policy::Learned | Policy::Reactive | Policy::Adr)
}

fn shade(policy: Policy) -> Option<RGBColor> {
    is_ours(policy).then_some(if policy == Policy::Learned { SHADE } else { LIGHT_SHADE })
}

fn draw_legend(root: &Area<'_>) -> Drawn {
    for ((_, name, colour), x) in PROVIDERS.iter().zip([25, 155, 270, 390]) {
        root.draw(&Circle::new((x, 53), 4, colour.filled()))?;
        root.draw(&Text::new(*name, (x + 11, 46), text(13)))?;
    }
    root.draw(&Circle::new((25, 77), 4, INK.stroke_width(2)))?;
    root.draw(&Text::new("some were never served", (36, 70), text(13)))?;
    root.draw(&Rectangle::new([(270, 69), (290, 85)], SHADE.filled()))?;
    root.draw(&Rectangle::new([(290, 69), (310, 85)], LIGHT_SHADE.filled()))?;
    root.draw(&Text::new("this crate, as it comes and as an option", (318, 70), text(13)))?;
    Ok(())
}

fn draw_names(rows: &[Row<'_>], heights: &[i32], area: &Area<'_>) -> Drawn {
    for ((policy, _), height) in rows.iter().zip(heights) {
        let style = if *policy == Policy::Learned {
            ("sans-serif", 14, FontStyle::Bold).into_font().color(&INK)
        } else {
            text(14)
        };
        area.draw(&Text::new(policy.name(), (110, *height), style.pos(Pos::new(HPos::Right, VPos::Center))))?;
    }
    Ok(())
}

/// Gives back at what height each row is.
fn draw(panel: &Panel, rows: &[Row<'_>], area: &Area<'_>) -> Result<Vec<i32>, Box<dyn Error>> {
    let (start, end) = panel.ends();
    let room = (end - start) * 0.06;
    let (left, right) = (start - room, end + room);
    let mut chart = ChartBuilder::on(area)
        .caption(panel.heading, text(14))
        .margin_right(14)
        .x_label_area_size(48)
        .build_cartesian_2d(left..right, rows.len() as f64 - 0.5..-0.5)?;
    for (y, (policy, _)) in rows.iter().enumerate() {
        let band = [(left, y as f64 - 0.5), (right, y as f64 + 0.5)];
        chart.draw_series(shade(*policy).map(|shade| Rectangle::new(band, shade.filled())))?;
    }
    draw_ticks(panel, rows.len(), area, &mut chart)?;
    for (y, (_, figures)) in rows.iter().enumerate() {
        for (n, (figures, (_, _, colour))) in figures.iter().zip(PROVIDERS).enumerate() {
            // Beside each other rather than on top of each other.
            let y = y as f64 + (n as f64 - 1.5) * 0.2;
            let dot = if figures.locked_out > 0.0 { colour.stroke_width(2) } else { colour.filled() };
            chart.draw_series([Circle::new((panel.place(figures), y), 4, dot)])?;
        }
    }
    let height = |y| chart.backend_coord(&(start, y as f64)).1 - area.get_base_pixel().1;
    Ok((0..rows.len()).map(height).collect())
}

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

fn draw_ticks(panel: &Panel, rows: usize, area: &Area<'_>, chart: &mut Chart<'_, '_>) -> Drawn {
    let (top, bottom) = (-0.5, rows as f64 - 0.5);
    let below = |x, y| {
        let (x, from) = chart.backend_coord(&(x, bottom));
        let (left, above) = area.get_base_pixel();
        (x - left, from - above + y)
    };
    let centred = text(13).pos(Pos::new(HPos::Center, VPos::Top));
    for &tick in panel.ticks {
        area.draw(&Text::new(panel.axis.label(tick), below(panel.axis.place(tick), 8), centred.clone()))?;
    }
    let (start, end) = panel.ends();
    area.draw(&Text::new(panel.unit, below(f64::midpoint(start, end), 28), centred))?;
    let lines = panel.ticks.iter().map(|tick| {
        let x = panel.axis.place(*tick);
        PathElement::new([(x, top), (x, bottom)], GRID)
    });
    chart.draw_series(lines)?;
    let room = (end - start) * 0.06;
    chart.draw_series([PathElement::new([(start - room, bottom), (end + room, bottom)], AXIS)])?;
    Ok(())
}
