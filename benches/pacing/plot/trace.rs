//! One run: what the gate learns of a host that serves one request per 25 s and says nothing about it.

use std::path::Path;
use std::time::Duration;

use plotters::prelude::*;

use super::{AXIS, BLUE, Drawn, GREEN, GRID, INK, RED, SHADE, text};
use crate::client::{Lesson, Policy};
use crate::draw::Seed;
use crate::load::Load;
use crate::provider::Provider;
use crate::run::{Run, Setting, simulate};
use crate::site::{Event, What};

const WINDOW: Duration = Duration::from_secs(25);
/// Enough for the gap to be tried again.
const LOAD: Load = Load::Batch(40);
const HEADING: &str = "Forty requests to a host that serves one per 25 s and does not say so";

pub(crate) fn write(file: &Path, seed: Seed) -> Drawn {
    let setting = Setting { load: LOAD, policy: Policy::Learned, in_flight: 1, seed, trace: true };
    let run = simulate(|| Provider::one_per(WINDOW, seed), setting);
    let sends = sends(&run);
    let end = sends.last().map_or(1.0, |send| send.at) * 1.02;
    let longest = sends.iter().map(|send| send.apart).fold(WINDOW.as_secs_f64(), f64::max) * 1.12;

    let root = SVGBackend::new(file, (900, 440)).into_drawing_area();
    root.fill(&WHITE)?;
    root.draw(&Text::new(HEADING, (20, 14), text(18)))?;
    let (legend, area) = root.split_vertically(92);
    draw_legend(&legend)?;
    let mut chart = ChartBuilder::on(&area)
        .margin_left(8)
        .margin_right(20)
        .margin_bottom(6)
        .x_label_area_size(46)
        .y_label_area_size(66)
        .build_cartesian_2d(-0.012 * end..end, -0.03 * longest..longest)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(AXIS)
        .label_style(text(13))
        .axis_desc_style(text(13))
        .x_desc("time since the first request")
        .y_desc("time between two requests")
        .x_label_formatter(&|minutes| format!("{minutes:.0} min"))
        .y_label_formatter(&|seconds| format!("{seconds:.0} s"))
        .draw()?;
    chart.draw_series(brackets(&run.lessons, end))?;
    for bound in [|lesson: &Lesson| lesson.too_short, |lesson: &Lesson| lesson.known_good] {
        chart.draw_series(LineSeries::new(steps(&run.lessons, end, bound), BLUE.mix(0.4)))?;
    }
    let window = WINDOW.as_secs_f64();
    chart.draw_series(DashedLineSeries::new([(0.0, window), (end, window)], 6, 4, INK.stroke_width(1)))?;
    chart.draw_series(LineSeries::new(steps(&run.lessons, end, |lesson| lesson.gap), BLUE.stroke_width(3)))?;
    chart.draw_series(sends.iter().map(|send| {
        let colour = if send.served { GREEN } else { RED };
        Circle::new((send.at, send.apart), 4, colour.filled())
    }))?;
    root.present()?;
    Ok(())
}

fn draw_legend(area: &super::Area<'_>) -> Drawn {
    area.draw(&PathElement::new([(20, 53), (46, 53)], BLUE.stroke_width(3)))?;
    area.draw(&Text::new("gap that the gate has learned", (54, 46), text(13)))?;
    area.draw(&Rectangle::new([(280, 45), (306, 61)], SHADE.filled()))?;
    area.draw(&Text::new(
        "between the longest gap that was too short and the shortest known to be good",
        (314, 46),
        text(13),
    ))?;
    area.draw(&Circle::new((25, 77), 4, GREEN.filled()))?;
    area.draw(&Text::new("served", (36, 70), text(13)))?;
    area.draw(&Circle::new((95, 77), 4, RED.filled()))?;
    area.draw(&Text::new("refused, so long after the last one served", (106, 70), text(13)))?;
    area.draw(&PathElement::new([(400, 77), (406, 77)], INK.stroke_width(1)))?;
    area.draw(&PathElement::new([(410, 77), (416, 77)], INK.stroke_width(1)))?;
    area.draw(&PathElement::new([(420, 77), (426, 77)], INK.stroke_width(1)))?;
    area.draw(&Text::new("what the host wants", (434, 70), text(13)))?;
    Ok(())
}

struct Send {
    /// In minutes.
    at: f64,
    /// In seconds, from the last one that was served; nothing before there was one.
    apart: f64,
    served: bool,
}

fn sends(run: &Run) -> Vec<Send> {
    let mut last_served = None;
    let answers = run.record.iter().filter(|event| event.what != What::Sent);
    let send = |event: &Event| {
        let apart = event.sent - last_served.unwrap_or(event.sent);
        let served = event.what == What::Served;
        if served {
            last_served = Some(event.sent);
        }
        Send { at: minutes(event.sent), apart: apart.as_secs_f64(), served }
    };
    answers.map(send).collect()
}

/// A lesson holds until the next one.
fn lasting(lessons: &[Lesson], end: f64) -> impl Iterator<Item = (f64, f64, &Lesson)> {
    let ends = lessons.iter().skip(1).map(|next| minutes(next.at)).chain([end]);
    lessons.iter().zip(ends).map(|(lesson, until)| (minutes(lesson.at), until, lesson))
}

fn steps(lessons: &[Lesson], end: f64, time: fn(&Lesson) -> Duration) -> impl Iterator<Item = (f64, f64)> {
    lasting(lessons, end).flat_map(move |(from, until, lesson)| {
        let time = time(lesson).as_secs_f64();
        [(from, time), (until, time)]
    })
}

fn brackets(lessons: &[Lesson], end: f64) -> impl Iterator<Item = Rectangle<(f64, f64)>> {
    let known = lasting(lessons, end).filter(|(.., lesson)| !lesson.known_good.is_zero());
    known.map(|(from, until, lesson)| {
        let corners = [(from, lesson.too_short.as_secs_f64()), (until, lesson.known_good.as_secs_f64())];
        Rectangle::new(corners, SHADE.filled())
    })
}

fn minutes(time: Duration) -> f64 {
    time.as_secs_f64() / 60.0
}
