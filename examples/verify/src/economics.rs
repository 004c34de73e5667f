//! What a verify pass is worth: tokens per second, and how many tokens a pass has to commit to pay for itself.

use serde::Serialize;

/// Of one draft against plain decoding under the same all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Worth {
    /// Tokens a pass commits for a sequence: accepted drafts and the token that the pass adds.
    pub tokens_per_pass: f64,
    /// Tokens per second of one sequence.
    pub tokens_per_second: f64,
    /// Over plain decoding.
    pub gain: f64,
    /// Tokens a pass must commit to be as fast as plain decoding.
    pub break_even: f64,
}

impl Worth {
    /// A pass of `pass` seconds after `drafting` seconds, where plain decoding takes `plain` seconds a token.
    pub fn new(tokens_per_pass: f64, pass: f64, drafting: f64, plain: f64) -> Self {
        let step = pass + drafting;
        Worth {
            tokens_per_pass,
            tokens_per_second: tokens_per_pass / step,
            gain: tokens_per_pass * plain / step,
            break_even: step / plain,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_figures_come_out() {
        // 82 tokens per second plain; a pass of 30 ms loses with two tokens, one of 15 ms wins.
        let plain = 1.0 / 82.0;
        let slow = Worth::new(2.0, 0.030, 0.0, plain);
        assert!((slow.break_even - 2.46).abs() < 1e-9 && (slow.gain - 0.813).abs() < 1e-3);
        let fast = Worth::new(2.0, 0.015, 0.0, plain);
        assert!((fast.tokens_per_second - 133.33).abs() < 1e-2 && (fast.gain - 1.626).abs() < 1e-3);
        let drafted = Worth::new(2.0, 0.015, 0.003, plain);
        assert!((drafted.tokens_per_second - 111.11).abs() < 1e-2);
    }
}
