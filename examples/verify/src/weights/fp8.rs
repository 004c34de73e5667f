//! The format of the published DeepSeek-V3 and Kimi-K2 weights: 8-bit floats (e4m3) and a scale for each block of 128 by
//! 128.

/// Rows and columns that share a scale.
pub const BLOCK: usize = 128;

/// The value of an e4m3 number: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, one NaN of each sign.
pub fn decode(byte: u8) -> f32 {
    let (exponent, mantissa) = ((byte >> 3) & 15, f32::from(byte & 7));
    let value = match (exponent, byte & 7) {
        (0, _) => mantissa / 8.0 * 2f32.powi(-6),
        (15, 7) => f32::NAN,
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(i32::from(exponent) - 7),
    };
    if byte & 0x80 != 0 {
        -value
    } else {
        value
    }
}

#[cfg(test)]
mod tests {
    use super::decode;

    #[test]
    fn the_landmarks_of_the_format() {
        for (byte, value) in [
            (0x00, 0.0),
            (0x01, 0.001953125), // 2^-9, the smallest
            (0x08, 0.015625),    // 2^-6, the smallest normal one
            (0x38, 1.0),
            (0x3c, 1.5),
            (0xc0, -2.0),
            (0x7e, 448.0), // the largest
        ] {
            assert_eq!(decode(byte), value, "{byte:#x}");
        }
        assert!(decode(0x7f).is_nan() && decode(0xff).is_nan());
    }
}
