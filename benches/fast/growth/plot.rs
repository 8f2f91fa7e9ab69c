//! The picture: a panel per cost, both axes logarithmic.

use std::error::Error;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::Panel;

const INK: RGBColor = RGBColor(40, 44, 52);
const AXIS: RGBColor = RGBColor(150, 154, 160);
const GRID: RGBColor = RGBColor(226, 228, 232);
const COLOURS: [RGBColor; 3] = [RGBColor(38, 92, 196), RGBColor(22, 140, 90), RGBColor(226, 140, 20)];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn Error>>;

pub(super) fn write(file: &Path, panels: &[Panel]) -> Drawn {
    const COLUMNS: usize = 4;
    let rows = panels.len().div_ceil(COLUMNS);
    let root = SVGBackend::new(file, (1_080, 60 + 280 * rows as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    root.draw(&Text::new("What all hosts and all waiters cost together, by their number", (20, 14), text(18)))?;
    root.draw(&Text::new("dashed: in proportion to the number", (20, 38), text(13)))?;
    let areas = root.margin(60, 0, 10, 10).split_evenly((rows, COLUMNS));
    areas.iter().zip(panels).try_for_each(|(area, panel)| draw(panel, area))?;
    root.present()?;
    Ok(())
}

fn draw(panel: &Panel, area: &Area<'_>) -> Drawn {
    let points = || panel.curves.iter().flat_map(|curve| curve.points.iter().copied());
    let (left, right) = ends(points().map(|(size, _)| size));
    let (bottom, top) = ends(points().map(|(_, total)| total));
    // Room for the names of the curves.
    let room = (top / bottom).powf(0.12 * panel.curves.len() as f64);
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{}, {}", panel.heading, panel.unit), text(14))
        .margin_right(16)
        .margin_bottom(10)
        .x_label_area_size(44)
        .y_label_area_size(50)
        .build_cartesian_2d((left..right).log_scale(), (bottom..top * room).log_scale())?;
    chart
        .configure_mesh()
        .x_desc(panel.over)
        .x_label_formatter(&label)
        .y_label_formatter(&label)
        .label_style(text(12))
        .axis_style(AXIS)
        .bold_line_style(GRID)
        .max_light_lines(1)
        .light_line_style(TRANSPARENT)
        .y_labels(6)
        .draw()?;
    // In proportion to the highest of all totals.
    let (size, total) = points().fold((right, bottom), |most, point| if point.1 > most.1 { point } else { most });
    let proportional = [left.max(size * bottom / total), size].map(|x| (x, total * x / size));
    chart.draw_series(DashedLineSeries::new(proportional, 4, 4, AXIS.stroke_width(1)))?;
    for (n, (curve, colour)) in panel.curves.iter().zip(COLOURS).enumerate() {
        let colour = if curve.is_peer { AXIS } else { colour };
        chart.draw_series(LineSeries::new(curve.points.iter().copied(), colour.stroke_width(2)))?;
        chart.draw_series(curve.points.iter().map(|point| Circle::new(*point, 3, colour.filled())))?;
        let style = text(13).color(&colour).pos(Pos::new(HPos::Left, VPos::Top));
        area.draw(&Text::new(curve.name, (62, 34 + 16 * n as i32), style))?;
    }
    Ok(())
}

/// The powers of ten around all of them.
fn ends(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (least, most) = values.fold((f64::MAX, f64::MIN), |(least, most), value| (least.min(value), most.max(value)));
    let (down, up) = (least.log10().floor(), most.log10().ceil());
    (10_f64.powf(down), 10_f64.powf(up.max(down + 1.0)))
}

fn label(value: &f64) -> String {
    match *value {
        value if value >= 1e9 => format!("{}G", value / 1e9),
        value if value >= 1e6 => format!("{}M", value / 1e6),
        value if value >= 1e3 => format!("{}k", value / 1e3),
        value => format!("{value}"),
    }
}

fn text(size: u32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&INK)
}
