//! One chart of the page: latency over size, both axes logarithmic, as an SVG element.

use super::escape;
use anyhow::{anyhow, Result};
use plotters::coord::combinators::{BindKeyPoints, IntoLogRange};
use plotters::prelude::*;
use plotters::series::LineSeries;

const WIDTH: u32 = 640;
const HEIGHT: u32 = 400;
/// Most labels on the axis of sizes; more would run into each other.
const MOST_SIZES: usize = 10;
const INK: RGBColor = RGBColor(0x1f, 0x29, 0x33);
const GRID: RGBColor = RGBColor(0xe4, 0xe7, 0xeb);
const AXIS: RGBColor = RGBColor(0x61, 0x6e, 0x7c);

/// How the points of a curve look; curves differ in colour and in shape, for eyes that do not tell the colours apart.
#[derive(Clone, Copy)]
pub enum Marker {
    Circle,
    Triangle,
    Cross,
}

/// One curve: (bytes, microseconds), ascending and above 0.
pub struct Curve<'a> {
    pub name: &'a str,
    pub colour: (u8, u8, u8),
    pub marker: Marker,
    pub points: Vec<(f64, f64)>,
}

/// The chart as an `svg` element with `title` as its accessible name and `summary` as its description. `id` is unique on
/// the page.
pub fn svg(id: &str, title: &str, summary: &str, curves: &[Curve]) -> Result<String> {
    let mut drawn = String::new();
    draw(&mut drawn, curves).map_err(|error| anyhow!("--report: drawing {title}: {error}"))?;
    // Plotters opens the element with a fixed size and no name; ours scales with the page and speaks to screen readers.
    let (_, body) = drawn
        .split_once("<svg ")
        .and_then(|(_, rest)| rest.split_once('>'))
        .ok_or_else(|| anyhow!("--report: the chart {title} is no SVG"))?;
    Ok(format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-labelledby=\"{id}-title {id}-desc\">\n\
         <title id=\"{id}-title\">{}</title>\n<desc id=\"{id}-desc\">{}</desc>{body}",
        escape(title),
        escape(summary)
    ))
}

fn draw(into: &mut String, curves: &[Curve]) -> Result<(), Box<dyn std::error::Error>> {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let mut sizes: Vec<f64> = points().map(|point| point.0).collect();
    sizes.sort_unstable_by(f64::total_cmp);
    sizes.dedup();
    let (Some(&first), Some(&last)) = (sizes.first(), sizes.last()) else {
        return Err("there is no point to draw".into());
    };
    let lowest = points().map(|point| point.1).fold(f64::INFINITY, f64::min);
    let highest = points().map(|point| point.1).fold(0.0, f64::max);
    let (ticks, low, high) = decades(lowest, highest);

    let root = SVGBackend::with_string(into, (WIDTH, HEIGHT)).into_drawing_area();
    root.fill(&WHITE)?;
    let font = |size: u32| ("sans-serif", size).into_font().color(&INK);
    let mut chart = ChartBuilder::on(&root)
        .margin(10)
        .margin_right(24)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(
            (first / 1.25..last * 1.25).log_scale().with_key_points(thinned(&sizes)),
            (low..high).log_scale().with_key_points(ticks),
        )?;
    chart
        .configure_mesh()
        .max_light_lines(0)
        .bold_line_style(GRID)
        .axis_style(AXIS)
        .label_style(font(14))
        .x_label_formatter(&|bytes| size(*bytes))
        .y_label_formatter(&|us| format!("{us}"))
        .x_labels(MOST_SIZES)
        .x_desc("message size (bytes of one rank)")
        .y_desc("time of a call (µs)")
        .axis_desc_style(font(15))
        .draw()?;
    for curve in curves {
        let (r, g, b) = curve.colour;
        let colour = RGBColor(r, g, b);
        let marker = curve.marker;
        chart
            .draw_series(LineSeries::new(curve.points.iter().copied(), colour.stroke_width(2)))?
            .label(curve.name)
            .legend(move |(x, y)| {
                EmptyElement::at((x, y))
                    + PathElement::new([(0, 0), (24, 0)], colour.stroke_width(2))
                    + mark(marker, (12, 0), colour)
            });
        chart.draw_series(curve.points.iter().map(|&point| mark(marker, point, colour)))?;
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

fn mark<DB: DrawingBackend, C: Clone + 'static>(
    marker: Marker,
    at: C,
    colour: RGBColor,
) -> DynElement<'static, DB, C> {
    match marker {
        Marker::Circle => Circle::new(at, 4, colour.filled()).into_dyn(),
        Marker::Triangle => TriangleMarker::new(at, 5, colour.filled()).into_dyn(),
        Marker::Cross => Cross::new(at, 4, colour.stroke_width(2)).into_dyn(),
    }
}

/// At most [`MOST_SIZES`] of the sizes, evenly spaced.
fn thinned(sizes: &[f64]) -> Vec<f64> {
    let step = sizes.len().div_ceil(MOST_SIZES).max(1);
    sizes.iter().copied().step_by(step).collect()
}

/// Round numbers for the axis of times (1, 2 and 5 of each power of ten, or the powers alone over a wide range), and where
/// the axis begins and ends, with room for the legend above the curves.
fn decades(lowest: f64, highest: f64) -> (Vec<f64>, f64, f64) {
    // Parsed and not computed: 10^-1 * 2 is not 0.2.
    let tick = |lead: u32, power: i32| format!("{lead}e{power}").parse::<f64>().ok();
    let (from, to) = (lowest.log10().floor() as i32, highest.log10().ceil() as i32 + 3);
    let round: Vec<(u32, f64)> = (from..=to)
        .flat_map(|power| [1, 2, 5].map(|lead| (lead, tick(lead, power))))
        .filter_map(|(lead, value)| Some((lead, value?)))
        .collect();
    let values = || round.iter().map(|&(_, value)| value);
    let low = values().filter(|&t| t <= lowest).fold(0.0, f64::max);
    let above = highest * (highest / low).max(2.0).powf(0.4);
    let high = values().find(|&t| t >= above).unwrap_or(above);
    let wide = high / low > 1000.0;
    let ticks = round
        .iter()
        .filter(|&&(lead, value)| value >= low && value <= high && (lead == 1 || !wide))
        .map(|&(_, value)| value)
        .collect();
    (ticks, low, high)
}

/// Bytes with the suffixes of the flags, where they are a round number of them.
pub fn size(bytes: f64) -> String {
    let bytes = bytes.round() as u64;
    match bytes {
        b if b >= 1 << 30 && b % (1 << 30) == 0 => format!("{}G", b >> 30),
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{}M", b >> 20),
        b if b >= 1 << 10 && b % (1 << 10) == 0 => format!("{}K", b >> 10),
        b => b.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_enclose_the_curves() {
        for (lowest, highest) in [(0.6, 5.0), (1.0, 1.0), (3.0, 25_000.0), (0.021, 90.0)] {
            let (ticks, low, high) = decades(lowest, highest);
            assert!(low <= lowest && high > highest, "{lowest} {highest}: {low} {high}");
            assert!(ticks.len() >= 2, "{ticks:?}");
            for tick in &ticks {
                assert!(tick.to_string().len() <= 7, "{tick}");
            }
        }
    }

    #[test]
    fn sizes_read_like_the_flags() {
        let shown = [96.0, 1024.0, 14336.0, 4194304.0, 1500.0].map(size);
        assert_eq!(shown, ["96", "1K", "14K", "4M", "1500"]);
        let many: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(thinned(&many).len(), 10);
        assert_eq!(thinned(&many[..3]), [1.0, 2.0, 3.0]);
    }

    #[test]
    fn names_that_look_like_markup_stay_text() {
        let curve = Curve {
            name: "<script>&",
            colour: (1, 2, 3),
            marker: Marker::Cross,
            points: vec![(1024.0, 1.0)],
        };
        let svg = svg("c", "a<b", "\"c\"", &[curve]).unwrap();
        assert!(svg.contains("a&lt;b") && svg.contains("&quot;c&quot;"), "{svg}");
        assert!(svg.contains("&lt;script&gt;&amp;") && !svg.contains("<script"), "{svg}");
    }
}
