//! Text of islands: refused, or what is printed is read as the same islands.
#![no_main]

use libfuzzer_sys::fuzz_target;
use peerlane::schedule::{Islands, Tree};

fuzz_target!(|data: &[u8]| {
    let Some((n, text)) = data.split_first() else { return };
    let n = usize::from(*n) % 20;
    if let Ok(islands) = Islands::parse(n, &String::from_utf8_lossy(text)) {
        assert_eq!(Islands::parse(n, &islands.to_string()), Ok(islands.clone()));
        assert_eq!(islands.ranks(), n);
        let _ = Tree::new(&islands).to_string();
    }
});
