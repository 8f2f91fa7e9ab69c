//! The timeline as a picture: one lane per feed, one panel per burst.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use crate::SCALE;
use crate::run::{Answer, FEEDS, HostRun, Run};

const SIZE: (u32, u32) = (1200, 1680);
const INK: RGBColor = RGBColor(40, 44, 52);
const WAITING: RGBColor = RGBColor(222, 226, 232);
const SERVED: RGBColor = RGBColor(22, 140, 90);
const REFUSED: RGBColor = RGBColor(208, 48, 56);
const SHED: RGBColor = RGBColor(226, 140, 20);

type Panel<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
type Drawn = Result<(), Box<dyn Error>>;

pub(crate) fn write(file: &Path, runs: &[Run]) -> Drawn {
    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let (head, panels) = root.split_vertically(70);
    heading(&head)?;
    for (run, area) in runs.iter().zip(panels.split_evenly((runs.len(), 1))) {
        panel(run, &area)?;
    }
    root.present()?;
    Ok(())
}

fn heading(area: &DrawingArea<SVGBackend<'_>, Shift>) -> Drawn {
    let title = format!("One burst of {FEEDS} feeds at each of three providers, four ways (time scaled 1:{SCALE})");
    area.draw(&Text::new(title, (20, 14), ("sans-serif", 22).into_font().color(&INK)))?;
    let small = ("sans-serif", 15).into_font().color(&INK);
    let y = 54;
    area.draw(&PathElement::new([(20, y), (44, y)], WAITING.stroke_width(6)))?;
    area.draw(&Text::new("the caller waits", (52, y - 7), small.clone()))?;
    area.draw(&Circle::new((200, y), 4, SERVED.filled()))?;
    area.draw(&Text::new("served", (210, y - 7), small.clone()))?;
    area.draw(&Cross::new((290, y), 4, REFUSED.stroke_width(2)))?;
    area.draw(&Text::new("refused with 429", (300, y - 7), small.clone()))?;
    area.draw(&TriangleMarker::new((450, y), 5, SHED.filled()))?;
    area.draw(&Text::new("shed: RateLimited, with the time to come back", (460, y - 7), small))?;
    Ok(())
}

fn panel(run: &Run, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Drawn {
    let lanes = run.hosts.len() * FEEDS;
    let length = run.took().as_secs_f64();
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{} — {}", run.way.name(), run.way.description()), ("sans-serif", 17).into_font().color(&INK))
        .margin_left(110)
        .margin_right(20)
        .x_label_area_size(34)
        .build_cartesian_2d(-0.01 * length..1.02 * length, lanes as f64 + 0.5..-1.0)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .light_line_style(TRANSPARENT)
        .bold_line_style(INK.mix(0.1))
        .axis_style(INK.mix(0.4))
        .label_style(("sans-serif", 13).into_font().color(&INK))
        .x_label_formatter(&|seconds| format!("{seconds:.2} s"))
        .draw()?;
    for (n, host) in run.hosts.iter().enumerate() {
        let first = (n * FEEDS) as f64;
        let middle = chart.backend_coord(&(0.0, first + FEEDS as f64 / 2.0)).1 - area.get_base_pixel().1;
        area.draw(&Text::new(host.provider, (16, middle - 8), ("sans-serif", 15).into_font().color(&INK)))?;
        if n > 0 {
            let line = [(-0.01 * length, first - 0.5), (1.02 * length, first - 0.5)];
            chart.draw_series([PathElement::new(line, INK.mix(0.3))])?;
        }
        lanes_of(host, run, first, &mut chart)?;
    }
    Ok(())
}

fn lanes_of(host: &HostRun, run: &Run, first: f64, chart: &mut Panel<'_>) -> Drawn {
    let seconds = |at: Instant| (at - run.start).as_secs_f64();
    // The first to be answered is on top.
    let mut ends = host.ends.clone();
    ends.sort_by_key(|end| end.at);
    let lane = |feed: usize| first + ends.iter().position(|end| end.feed == feed).unwrap_or_default() as f64;
    let at_end = |answer| {
        let ended = ends.iter().filter(move |end| end.answer == answer);
        ended.map(|end| (seconds(end.at), lane(end.feed)))
    };
    let refused = host.hits.iter().filter(|hit| hit.refused).map(|hit| (seconds(hit.at), lane(hit.feed)));

    chart.draw_series(ends.iter().map(|end| {
        let y = lane(end.feed);
        PathElement::new([(0.0, y), (seconds(end.at), y)], WAITING.stroke_width(5))
    }))?;
    chart.draw_series(refused.map(|at| Cross::new(at, 3, REFUSED.stroke_width(2))))?;
    chart.draw_series(at_end(Answer::Served).map(|at| Circle::new(at, 3, SERVED.filled())))?;
    chart.draw_series(at_end(Answer::Shed).map(|at| TriangleMarker::new(at, 4, SHED.filled())))?;
    Ok(())
}
