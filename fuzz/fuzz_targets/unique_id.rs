//! A unique id as bytes and as text: refused, or it survives the other form.
#![no_main]

use libfuzzer_sys::fuzz_target;
use peerlane::bootstrap::UniqueId;

fuzz_target!(|data: &[u8]| {
    if let Ok(bytes) = data.try_into() {
        if let Ok(id) = UniqueId::from_bytes(bytes) {
            assert_eq!(id.as_bytes(), &bytes);
            assert!(id.to_string().parse::<UniqueId>() == Ok(id));
        }
    }
    if let Ok(id) = String::from_utf8_lossy(data).parse::<UniqueId>() {
        assert!(UniqueId::from_bytes(*id.as_bytes()) == Ok(id));
    }
});
