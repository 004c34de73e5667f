//! What happens at every call before and after its own work: refusals, delays, counts, the log.

use crate::config;
use crate::errors::{OPERATION_NOT_PERMITTED, UNKNOWN_ERROR};
use std::cell::Cell;
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Defines driver functions. Bodies return `Result<(), u32>` and may take the caller's pointers at the driver API's word.
macro_rules! entry {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        #[no_mangle]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> u32 {
            // SAFETY: the arguments are what the driver API's documentation asks of its caller.
            $crate::entry::call(stringify!($name), || -> Result<(), u32> { #[allow(unused_unsafe)] unsafe { $body } })
        }
    )*};
}
pub(crate) use entry;

thread_local! {
    /// Set while a user object's destructor runs: the driver may not be called from there.
    pub static IN_DESTRUCTOR: Cell<bool> = const { Cell::new(false) };
    static THREAD_RANK: Cell<Option<i32>> = const { Cell::new(None) };
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Rule {
    call: String,
    nth: Option<u64>,
    rank: Option<String>,
    value: u32,
}

impl Rule {
    fn parse(name: &str, list: &str, default: Option<u32>) -> Vec<Self> {
        let any = |text: &str| (text != "*").then(|| text.to_owned());
        list.split(',')
            .filter(|rule| !rule.is_empty())
            .map(|rule| {
                let parts: Vec<&str> = rule.split(':').collect();
                let value = match parts.get(3) {
                    Some(text) => text.parse().ok(),
                    None => default,
                };
                match (parts.as_slice(), value) {
                    ([call, nth, rank, ..], Some(value)) if parts.len() <= 4 => Rule {
                        call: (*call).to_owned(),
                        nth: any(nth)
                            .map(|n| n.parse().unwrap_or_else(|_| config::bad(name, rule))),
                        rank: any(rank),
                        value,
                    },
                    _ => config::bad(name, rule),
                }
            })
            .collect()
    }

    fn applies(&self, call: &str, nth: u64, rank: &str) -> bool {
        (self.call == "*" || self.call == call || Some(self.call.as_str()) == plain(call))
            && self.nth.is_none_or(|n| n == nth)
            && self.rank.as_deref().is_none_or(|r| r == rank)
    }
}

/// The name without its version suffix.
fn plain(call: &str) -> Option<&str> {
    call.strip_suffix("_v2").or_else(|| call.strip_suffix("_v3"))
}

struct Hooks {
    fail: Vec<Rule>,
    delay: Vec<Rule>,
    log: Option<File>,
    counts: HashMap<(&'static str, String), u64>,
}

static HOOKS: LazyLock<Mutex<Hooks>> = LazyLock::new(|| {
    let rules = |name: &str, default| {
        config::text(name).map(|list| Rule::parse(name, &list, default)).unwrap_or_default()
    };
    Mutex::new(Hooks {
        fail: rules("FAKECUDA_FAIL", Some(UNKNOWN_ERROR)),
        delay: rules("FAKECUDA_DELAY", None),
        log: config::text("FAKECUDA_LOG").map(|path| {
            OpenOptions::new()
                .create(true)
                .append(true)
                .open(&path)
                .unwrap_or_else(|_| config::bad("FAKECUDA_LOG", &path))
        }),
        counts: HashMap::new(),
    })
});

/// Names the caller's rank from now on, in this thread.
pub fn set_rank(rank: i32) {
    THREAD_RANK.set(Some(rank));
}

/// Replaces the rules, and counts calls from one again.
pub fn set_fail(rules: &str) {
    let mut hooks = lock(&HOOKS);
    hooks.fail = Rule::parse("fakecuda_set_fail", rules, Some(UNKNOWN_ERROR));
    hooks.counts.clear();
}

/// How often `call` was made, by all ranks; by its exact name, or where that was never made, without the version suffix.
pub fn count(call: &str) -> u64 {
    let hooks = lock(&HOOKS);
    let sum = |matches: &dyn Fn(&str) -> bool| {
        hooks.counts.iter().filter(|((name, _), _)| matches(name)).map(|(_, n)| n).sum()
    };
    match sum(&|name| name == call) {
        0 => sum(&|name| plain(name) == Some(call)),
        exact => exact,
    }
}

fn rank() -> String {
    match THREAD_RANK.get() {
        Some(rank) => rank.to_string(),
        None => config::text("FAKECUDA_RANK").unwrap_or_else(|| "-".into()),
    }
}

pub fn call(name: &'static str, body: impl FnOnce() -> Result<(), u32>) -> u32 {
    let rank = rank();
    let (refused, delay) = {
        let mut hooks = lock(&HOOKS);
        let nth = hooks.counts.entry((name, rank.clone())).or_default();
        *nth += 1;
        let nth = *nth;
        let find = |rules: &[Rule]| {
            rules.iter().find(|rule| rule.applies(name, nth, &rank)).map(|rule| rule.value)
        };
        (find(&hooks.fail), find(&hooks.delay))
    };
    if let Some(milliseconds) = delay {
        std::thread::sleep(Duration::from_millis(milliseconds.into()));
    }
    let code = if IN_DESTRUCTOR.get() {
        OPERATION_NOT_PERMITTED
    } else {
        match refused {
            Some(code) => code,
            None => body().err().unwrap_or(0),
        }
    };
    if let Some(log) = &mut lock(&HOOKS).log {
        // One write, so that lines of several processes do not mix; a log that cannot be written has no reader.
        let _ = log.write_all(format!("{} {rank} {name} {code}\n", std::process::id()).as_bytes());
    }
    code
}
