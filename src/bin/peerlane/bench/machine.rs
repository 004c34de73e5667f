//! What the run ran on, in a line.

/// The CPU, the cores this process may use, and the kernel.
pub fn describe() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!(
        "{}, {cores} core{}, Linux {}",
        cpu_model(&cpuinfo).unwrap_or("unknown CPU"),
        if cores == 1 { "" } else { "s" },
        kernel.trim()
    )
}

/// x86 says `model name`; arm64 kernels name only the implementer's numbers.
fn cpu_model(cpuinfo: &str) -> Option<&str> {
    cpuinfo
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == "model name")
        .map(|(_, value)| value.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_found_where_there_is_one() {
        let text = "processor\t: 0\nmodel name\t: Some CPU @ 2.60GHz\n";
        assert_eq!(cpu_model(text), Some("Some CPU @ 2.60GHz"));
        assert_eq!(cpu_model("processor\t: 0\n"), None);
    }
}
