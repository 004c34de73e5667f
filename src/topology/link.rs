//! How fast a PCIe link is, now and at best.

use serde::Serialize;
use std::fmt;

/// A link's rate in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rate {
    /// PCIe generation, where it is known.
    pub generation: Option<u8>,
    /// Lanes, where known.
    pub width: Option<u8>,
    /// Payload after line encoding, in GB/s (10^9 bytes), before the overhead of packets.
    pub gb_per_s: f64,
}

/// GB/s of a lane by generation, after line encoding (8b/10b, then 128b/130b, then FLIT mode as hwloc counts it).
const LANE: [f64; 7] = [0.25, 0.5, 0.984_615, 1.969_231, 3.938_462, 7.563, 15.126];
/// GT/s of a lane by generation, as sysfs writes it.
const TRANSFERS: [&str; 7] = ["2.5", "5", "8", "16", "32", "64", "128"];
/// Widths that PCIe has.
const WIDTHS: [u8; 7] = [1, 2, 4, 8, 12, 16, 32];

impl Rate {
    /// A rate from sysfs: speed as `16.0 GT/s PCIe`, width as `16`. `None` where the kernel does not know (`Unknown`, width
    /// 0 or 255).
    pub fn from_sysfs(speed: &str, width: &str) -> Option<Self> {
        let number = speed.split_whitespace().next()?;
        let number = number.strip_suffix(".0").unwrap_or(number);
        let generation = TRANSFERS.iter().position(|t| *t == number)?;
        let width: u8 = width.trim().parse().ok().filter(|w| WIDTHS.contains(w))?;
        Some(Rate {
            generation: Some(generation as u8 + 1),
            width: Some(width),
            gb_per_s: LANE[generation] * f64::from(width),
        })
    }

    /// A rate of which only GB/s are known, as hwloc gives it; `None` for 0, which is its word for unknown.
    pub fn from_gb_per_s(gb_per_s: f64) -> Option<Self> {
        (gb_per_s.is_finite() && gb_per_s > 0.0 && gb_per_s < 1e4).then_some(Rate {
            generation: None,
            width: None,
            gb_per_s,
        })
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.generation, self.width) {
            (Some(generation), Some(width)) => write!(f, "Gen{generation} x{width}"),
            _ => write!(f, "{:.1} GB/s", self.gb_per_s),
        }
    }
}

/// The link above a device: from a GPU to its port, from a switch to what it hangs on, from a root port downwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Link {
    /// As it is trained now. An idle GPU lowers its generation.
    pub now: Option<Rate>,
    /// The best that this end of it can do.
    pub best: Option<Rate>,
}

impl Link {
    /// What to reckon with: the better of the two, since an idle link speeds up when used; but a lost lane stays lost.
    pub fn gb_per_s(&self) -> Option<f64> {
        match (self.now, self.best) {
            (Some(now), Some(best)) => Some(match (now.width, best.width) {
                (Some(has), Some(could)) if has < could => {
                    best.gb_per_s * f64::from(has) / f64::from(could)
                }
                _ => best.gb_per_s.max(now.gb_per_s),
            }),
            (one, other) => one.or(other).map(|r| r.gb_per_s),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_what_the_standard_says() {
        let rate = Rate::from_sysfs("16.0 GT/s PCIe", "16\n").unwrap();
        assert_eq!((rate.generation, rate.width), (Some(4), Some(16)));
        assert!((rate.gb_per_s - 31.507_692).abs() < 1e-4, "{rate:?}");
        assert_eq!(Rate::from_sysfs("2.5 GT/s", "8").unwrap().gb_per_s, 2.0);
        assert_eq!(rate.to_string(), "Gen4 x16");
    }

    #[test]
    fn what_the_kernel_does_not_know_is_no_rate() {
        for (speed, width) in [
            ("Unknown", "16"),
            ("16.0 GT/s", "0"),
            ("16.0 GT/s", "255"),
            ("", ""),
            ("17 GT/s", "16"),
        ] {
            assert_eq!(Rate::from_sysfs(speed, width), None, "{speed} {width}");
        }
        for gb_per_s in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(Rate::from_gb_per_s(gb_per_s), None);
        }
    }

    #[test]
    fn an_idle_generation_is_not_reckoned_with_but_a_lost_lane_is() {
        let link = |now, best| Link { now, best };
        let full = Rate::from_sysfs("32 GT/s", "16");
        assert_eq!(
            link(Rate::from_sysfs("2.5 GT/s", "16"), full).gb_per_s(),
            full.map(|r| r.gb_per_s)
        );
        assert_eq!(
            link(Rate::from_sysfs("32 GT/s", "8"), full).gb_per_s(),
            full.map(|r| r.gb_per_s / 2.0)
        );
        assert_eq!(link(None, None).gb_per_s(), None);
    }
}
