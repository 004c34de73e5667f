//! `docs/reliability.md` names tests; each of them is in the tree, in the file that the page says.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).ok()
}

/// The names in backquotes: (file, test in it), and what of it is not there.
fn missing(page: &str) -> (usize, Vec<String>) {
    let (mut file, mut text, mut tests, mut missing) = (String::new(), None, 0, Vec::new());
    for name in page.split('`').skip(1).step_by(2) {
        let word = name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        if name.ends_with(".rs") {
            file = name.to_owned();
            text = read(name);
            if text.is_none() {
                missing.push(format!("file {name}"));
            }
        } else if word && name.contains('_') {
            tests += 1;
            let test = format!("fn {name}(");
            if !text.as_ref().is_some_and(|text| text.contains(&test)) {
                missing.push(format!("test {name} in {file}"));
            }
        }
    }
    (tests, missing)
}

#[test]
fn every_test_that_the_page_names_exists() {
    let page = read("docs/reliability.md").unwrap();
    let (tests, missing) = missing(&page);
    assert_eq!(missing, Vec::<String>::new());
    assert!(tests >= 40, "{tests}");
    assert!(read("SECURITY.md").is_some());
}

#[test]
fn a_test_that_does_not_exist_is_noticed() {
    let page = "`tests/readme.rs`: `no_such_test`; `tests/nothing.rs`: `neither_this`";
    let (_, missing) = missing(page);
    assert_eq!(missing.len(), 3, "{missing:?}");
}
