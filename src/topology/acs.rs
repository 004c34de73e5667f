//! Access Control Services of a PCIe port: whether it sends traffic between its GPUs up to the root complex.

use serde::Serialize;

/// What a port's configuration space says of ACS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Acs {
    /// The extended configuration space could not be read: only root sees more than the first 64 bytes.
    #[default]
    Unknown,
    /// The port has no such capability.
    Absent,
    /// Its control register.
    Control(u16),
}

/// Offset of the extended configuration space.
const EXTENDED: usize = 0x100;
/// The capability's number.
const ACS_ID: u32 = 0x000d;
/// Offset of the control register in the capability.
const CONTROL: usize = 6;
/// Request redirect, completion redirect, upstream forwarding: each sends peer-to-peer traffic up.
const REDIRECTS: [(u16, &str); 3] = [
    (1 << 2, "request redirect"),
    (1 << 3, "completion redirect"),
    (1 << 4, "upstream forwarding"),
];

impl Acs {
    /// Reads it from a configuration space.
    pub fn from_config(config: &[u8]) -> Self {
        if config.len() <= EXTENDED {
            return Acs::Unknown;
        }
        let mut at = EXTENDED;
        // A list in 3840 bytes of entries of 4 or more has no more than this; a longer one is a circle.
        for _ in 0..960 {
            let Some(word) = config.get(at..at + 4) else { return Acs::Absent };
            let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            if word == 0 || word == u32::MAX {
                return Acs::Absent;
            }
            if word & 0xffff == ACS_ID {
                return match config.get(at + CONTROL..at + CONTROL + 2) {
                    Some(control) => Acs::Control(u16::from_le_bytes([control[0], control[1]])),
                    None => Acs::Absent,
                };
            }
            at = (word >> 20) as usize & !3;
            if at < EXTENDED {
                return Acs::Absent;
            }
        }
        Acs::Absent
    }

    /// A configuration space that says this and nothing else: a capture that gives away no serial number.
    pub fn to_config(self) -> Vec<u8> {
        let mut config = vec![0; if self == Acs::Unknown { 64 } else { 4096 }];
        if let Acs::Control(control) = self {
            let word = ACS_ID | 1 << 16;
            config[EXTENDED..EXTENDED + 4].copy_from_slice(&word.to_le_bytes());
            config[EXTENDED + CONTROL..EXTENDED + CONTROL + 2]
                .copy_from_slice(&control.to_le_bytes());
        }
        config
    }

    /// The names of the bits that redirect peer-to-peer traffic; empty if none is set or nothing is known.
    pub fn redirects(self) -> Vec<&'static str> {
        let Acs::Control(control) = self else { return Vec::new() };
        REDIRECTS.iter().filter(|(bit, _)| control & bit != 0).map(|(_, name)| *name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capability_is_found_behind_others() {
        let mut config = vec![0u8; 4096];
        // Advanced error reporting at 0x100, ACS at 0x148.
        config[0x100..0x104].copy_from_slice(&(0x0001u32 | 1 << 16 | 0x148 << 20).to_le_bytes());
        config[0x148..0x14c].copy_from_slice(&(ACS_ID | 1 << 16).to_le_bytes());
        config[0x14e] = 0x1d;
        let acs = Acs::from_config(&config);
        assert_eq!(acs, Acs::Control(0x1d));
        assert_eq!(
            acs.redirects(),
            ["request redirect", "completion redirect", "upstream forwarding"]
        );
    }

    #[test]
    fn circles_short_files_and_dead_devices_end() {
        let mut circle = vec![0u8; 4096];
        circle[0x100..0x104].copy_from_slice(&(0x0001u32 | 0x100 << 20).to_le_bytes());
        assert_eq!(Acs::from_config(&circle), Acs::Absent);
        assert_eq!(Acs::from_config(&[0; 64]), Acs::Unknown);
        assert_eq!(Acs::from_config(&[0xff; 4096]), Acs::Absent);
        let mut cut = Acs::Control(4).to_config();
        cut.truncate(0x105);
        assert_eq!(Acs::from_config(&cut), Acs::Absent);
    }

    #[test]
    fn what_is_written_is_read() {
        for acs in [Acs::Unknown, Acs::Absent, Acs::Control(0), Acs::Control(0x5f)] {
            assert_eq!(Acs::from_config(&acs.to_config()), acs);
        }
    }
}
