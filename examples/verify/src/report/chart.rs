//! The charts of the page, as SVG.

use crate::stamp::Part;
use anyhow::{anyhow, Result};
use plotters::prelude::*;
use plotters::series::LineSeries;

pub const WIDTH: u32 = 640;
pub const HEIGHT: u32 = 400;
pub const BLUE: RGBColor = RGBColor(0x1b, 0x5e, 0x9e);
pub const GREEN: RGBColor = RGBColor(0x1a, 0x93, 0x6f);
pub const RED: RGBColor = RGBColor(0xc4, 0x45, 0x36);
pub const AMBER: RGBColor = RGBColor(0xc9, 0x8a, 0x1b);
const INK: RGBColor = RGBColor(0x1f, 0x29, 0x33);
const GRID: RGBColor = RGBColor(0xe4, 0xe7, 0xeb);
const AXIS: RGBColor = RGBColor(0x61, 0x6e, 0x7c);

/// Colour of a part in a stacked bar.
fn colour(part: Part) -> RGBColor {
    match part {
        Part::Embed => AXIS,
        Part::Attention => BLUE,
        Part::Mlp => GREEN,
        Part::Wait => AMBER,
        Part::AllReduce => RED,
        Part::Norm => RGBColor(0x7b, 0x5e, 0xa7),
        Part::Head => RGBColor(0x8d, 0x99, 0xa6),
    }
}

/// A stacked bar: milliseconds by part.
pub struct Bar {
    pub name: String,
    pub parts: [(Part, f64); Part::ALL.len()],
}

/// A curve over draft width.
pub struct Curve<'a> {
    pub name: &'a str,
    pub colour: RGBColor,
    pub points: Vec<(f64, f64)>,
}

type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

/// A bar for each kind of layer.
pub fn stacked(bars: &[Bar]) -> Result<String> {
    let mut svg = String::new();
    draw_bars(&mut svg, bars).map_err(|error| anyhow!("--report: drawing the bars: {error}"))?;
    Ok(svg)
}

/// Curves over draft width.
pub fn lines(unit: &str, curves: &[Curve]) -> Result<String> {
    let mut svg = String::new();
    draw_lines(&mut svg, unit, curves)
        .map_err(|error| anyhow!("--report: drawing {unit}: {error}"))?;
    Ok(svg)
}

fn draw_bars(into: &mut String, bars: &[Bar]) -> Drawn {
    let height = |bar: &Bar| bar.parts.iter().map(|(_, ms)| ms).sum::<f64>();
    let highest = bars.iter().map(height).fold(1e-6, f64::max);
    let root = SVGBackend::with_string(into, (WIDTH, HEIGHT)).into_drawing_area();
    root.fill(&WHITE)?;
    let font = |size: u32| ("sans-serif", size).into_font().color(&INK);
    let slots = bars.len() as f64;
    let mut chart = ChartBuilder::on(&root)
        .margin(10)
        .x_label_area_size(32)
        .y_label_area_size(64)
        // The legend stands beside the bars.
        .build_cartesian_2d(0.0..slots + 0.9, 0.0..highest * 1.08)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(0)
        .max_light_lines(0)
        .bold_line_style(GRID)
        .axis_style(AXIS)
        .label_style(font(14))
        .y_desc("milliseconds")
        .axis_desc_style(font(15))
        .draw()?;
    for (part_at, part) in Part::ALL.into_iter().enumerate() {
        if bars.iter().all(|bar| bar.parts[part_at].1 == 0.0) {
            continue;
        }
        let fill = colour(part).filled();
        let rectangles = bars.iter().enumerate().map(|(at, bar)| {
            let below: f64 = bar.parts[..part_at].iter().map(|(_, ms)| ms).sum();
            let left = at as f64;
            Rectangle::new([(left + 0.2, below), (left + 0.8, below + bar.parts[part_at].1)], fill)
        });
        chart
            .draw_series(rectangles)?
            .label(part.name())
            .legend(move |(x, y)| Rectangle::new([(x, y - 6), (x + 16, y + 6)], fill));
    }
    let centred = font(14).pos(plotters::style::text_anchor::Pos::new(
        plotters::style::text_anchor::HPos::Center,
        plotters::style::text_anchor::VPos::Top,
    ));
    let area = chart.plotting_area();
    for (at, bar) in bars.iter().enumerate() {
        let (x, y) = area.map_coordinate(&(at as f64 + 0.5, 0.0));
        root.draw(&Text::new(bar.name.clone(), (x, y + 8), centred.clone()))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .legend_area_size(24)
        .margin(12)
        .background_style(WHITE.mix(0.9))
        .border_style(GRID)
        .label_font(font(15))
        .draw()?;
    root.present()?;
    Ok(())
}

fn draw_lines(into: &mut String, unit: &str, curves: &[Curve]) -> Drawn {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let widest = points().map(|point| point.0).fold(1.0, f64::max);
    let highest = points().map(|point| point.1).fold(1e-6, f64::max);
    let root = SVGBackend::with_string(into, (WIDTH, HEIGHT)).into_drawing_area();
    root.fill(&WHITE)?;
    let font = |size: u32| ("sans-serif", size).into_font().color(&INK);
    let mut chart = ChartBuilder::on(&root)
        .margin(10)
        .margin_right(24)
        .x_label_area_size(44)
        .y_label_area_size(64)
        // Room for the legend above the curves.
        .build_cartesian_2d(0.0..widest * 1.03, 0.0..highest * 1.45)?;
    chart
        .configure_mesh()
        .max_light_lines(0)
        .bold_line_style(GRID)
        .axis_style(AXIS)
        .label_style(font(14))
        // Whole rows, and not too many labels.
        .x_labels((widest as usize + 1).min(9))
        .x_label_formatter(&|rows| format!("{rows}"))
        .x_desc("rows of a sequence verified at once")
        .y_desc(unit)
        .axis_desc_style(font(15))
        .draw()?;
    for curve in curves {
        let colour = curve.colour;
        chart
            .draw_series(LineSeries::new(curve.points.iter().copied(), colour.stroke_width(2)))?
            .label(curve.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], colour.stroke_width(2)));
        let marks = curve.points.iter().map(|&point| Circle::new(point, 4, colour.filled()));
        chart.draw_series(marks)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .legend_area_size(34)
        .margin(12)
        .background_style(WHITE.mix(0.9))
        .border_style(GRID)
        .label_font(font(15))
        .draw()?;
    root.present()?;
    Ok(())
}
