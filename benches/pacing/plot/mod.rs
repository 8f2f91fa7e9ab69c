//! Two pictures: all policies in comparison, and one run of the gate.

mod comparison;
mod trace;

use std::error::Error;

use plotters::coord::Shift;
use plotters::prelude::*;

pub(crate) use comparison::write as comparison;
pub(crate) use trace::write as trace;

const INK: RGBColor = RGBColor(40, 44, 52);
const BLUE: RGBColor = RGBColor(38, 92, 196);
const GREEN: RGBColor = RGBColor(22, 140, 90);
const RED: RGBColor = RGBColor(208, 48, 56);
const ORANGE: RGBColor = RGBColor(226, 140, 20);
const PURPLE: RGBColor = RGBColor(160, 70, 170);
/// Behind what is this crate's.
const SHADE: RGBColor = RGBColor(214, 226, 250);
/// Of the ink, no more than needed.
const GRID: RGBColor = RGBColor(226, 228, 232);
const AXIS: RGBColor = RGBColor(150, 154, 160);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn Error>>;

fn text(size: u32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&INK)
}
