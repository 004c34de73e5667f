//! What a verdict depends on beside the GPUs: the boot, with which settings of bridges and of the driver come and go, and the
//! driver.

/// The kernel's id of this boot; none where there is no such file.
pub(crate) fn boot_id() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned()).filter(|id| !id.is_empty())
}

/// The version of NVIDIA's kernel module; none where there is no such module.
pub(crate) fn nvidia_driver() -> Option<String> {
    std::fs::read_to_string("/sys/module/nvidia/version").ok().map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_boot_has_a_name_that_stays() {
        assert_eq!(boot_id(), boot_id());
        assert!(boot_id().is_none_or(|id| id.len() == 36));
    }
}
