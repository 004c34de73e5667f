//! PCI addresses.

use serde::{Serialize, Serializer};
use std::fmt;

/// Where a device sits on the PCI buses: `domain:bus:device.function`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    /// Domain (segment); more than 16 bits behind a volume management device.
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device, below 32.
    pub device: u8,
    /// Function, below 8.
    pub function: u8,
}

impl Address {
    /// Reads `0000:12:00.0`, with any case; the domain may have 4 to 8 digits, as in sysfs and in the driver's text.
    pub fn parse(text: &str) -> Option<Self> {
        let (front, function) = text.split_once('.')?;
        let mut parts = front.split(':');
        let (domain, bus, device) = (parts.next()?, parts.next()?, parts.next()?);
        if parts.next().is_some() {
            return None;
        }
        let address = Address {
            domain: hex(domain, 4..=8)?,
            bus: hex(bus, 2..=2)? as u8,
            device: hex(device, 2..=2)? as u8,
            function: hex(function, 1..=1)? as u8,
        };
        (address.device < 32 && address.function < 8).then_some(address)
    }
}

/// A hexadecimal number without sign or prefix, of so many digits.
pub(super) fn hex(text: &str, digits: std::ops::RangeInclusive<usize>) -> Option<u32> {
    let plain = digits.contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
    plain.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Address { domain, bus, device, function } = self;
        f.pad(&format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_sysfs_and_the_driver_write_them() {
        for (text, shown) in [
            ("0000:12:00.0", "0000:12:00.0"),
            ("00000000:C1:1F.7", "0000:c1:1f.7"),
            ("10000:e1:00.0", "10000:e1:00.0"),
        ] {
            assert_eq!(Address::parse(text).unwrap().to_string(), shown);
        }
        for text in [
            "",
            "12:00.0",
            "0000:12:00",
            "0000:12:20.0",
            "0000:12:00.8",
            "0000:12:00.0:1",
            "0000:1+:00.0",
            "000:12:00.0",
        ] {
            assert_eq!(Address::parse(text), None, "{text}");
        }
    }
}
