//! The host's idea of the kernels' parameters.

use super::launch::SIZES;
use std::ffi::CString;

#[test]
fn parameters_are_as_large_as_the_kernels_take_them() {
    for (kernel, bytes) in SIZES {
        let name = CString::new(*kernel).unwrap();
        assert_eq!(verify_standin::parameter_bytes(&name), *bytes as u64, "{kernel}");
    }
    assert_eq!(verify_standin::parameter_bytes(c"verify_nothing"), 0);
}
