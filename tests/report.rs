//! `peerlane bench --report`: the page stands alone, and a browser draws its curves.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::Command;

/// Sizes of the run: five, so that a curve cannot be taken for an axis or a line of the legend.
const SIZES: [usize; 5] = [1024, 4096, 16384, 65536, 262144];
/// Colours of the curves out of place and in place.
const COLOURS: [&str; 2] = ["#1B5E9E", "#1A936F"];

/// A folder of this test's own, with an empty run directory in it.
fn folder(name: &str) -> PathBuf {
    use std::os::unix::fs::DirBuilderExt;
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("report-{name}"));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path.join("run")).unwrap();
    path
}

/// Measures into a page; the file's path and text.
fn page(folder: &Path, flags: &str) -> (PathBuf, String) {
    let path = folder.join("page.html");
    let output = Command::new(env!("CARGO_BIN_EXE_peerlane"))
        .arg("bench")
        .args(flags.split_whitespace())
        .arg("--report")
        .arg(&path)
        .env("PEERLANE_RUN_DIR", folder.join("run"))
        .env("PEERLANE_LOG", "off")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(&path).unwrap();
    (path, text)
}

/// The Chromium of this machine, by the names that distributions give it.
fn browser() -> Option<&'static str> {
    let runs = |name: &&str| {
        Command::new(name).arg("--version").output().is_ok_and(|o| o.status.success())
    };
    ["chromium", "chromium-browser", "google-chrome"].into_iter().find(runs)
}

/// What headless Chromium prints for the page; `what` is `--dump-dom` or `--screenshot=FILE`.
fn open(browser: &str, folder: &Path, what: &str, page: &Path) -> String {
    let profile = folder.join("profile");
    let _ = std::fs::remove_dir_all(&profile);
    let mut command = Command::new(browser);
    command.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        "--window-size=1200,1000",
    ]);
    command.arg(format!("--user-data-dir={}", profile.display()));
    command.arg(what).arg(format!("file://{}", page.display()));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The picture that the browser makes of `html`.
fn picture(browser: &str, folder: &Path, html: &str) -> Vec<u8> {
    let (page, file) = (folder.join("picture.html"), folder.join("picture.png"));
    std::fs::write(&page, html).unwrap();
    let _ = std::fs::remove_file(&file);
    open(browser, folder, &format!("--screenshot={}", file.display()), &page);
    let bytes = std::fs::read(&file).unwrap();
    assert!(bytes.starts_with(b"\x89PNG"), "no picture");
    bytes
}

/// The points of every polyline of `colour` in the page, chart by chart.
fn curves(dom: &str, colour: &str) -> Vec<Vec<(f64, f64)>> {
    let attribute = |tag: &str, name: &str| {
        let (_, rest) = tag.split_once(&format!(" {name}=\""))?;
        Some(rest.split('"').next().unwrap().to_owned())
    };
    dom.split("<polyline")
        .skip(1)
        .map(|rest| rest.split('>').next().unwrap())
        .filter(|tag| attribute(tag, "stroke").as_deref() == Some(colour))
        .map(|tag| {
            let points = attribute(tag, "points").unwrap();
            let point = |text: &str| {
                let (x, y) = text.split_once(',').unwrap();
                (x.parse().unwrap(), y.parse().unwrap())
            };
            points.split_whitespace().map(point).collect()
        })
        .collect()
}

#[test]
fn a_browser_draws_one_curve_per_way_to_call_with_a_point_for_each_size() {
    let folder = folder("curves");
    let (path, text) = page(
        &folder,
        "--ranks 2 --threads -b 1K -e 256K -f 4 -d float,int32 -o sum -n 3 --batches 3",
    );
    let browser = browser();
    let dom = match browser {
        Some(browser) => open(browser, &folder, "--dump-dom", &path),
        None => {
            // Distributions that have none as a package; `scripts/setup test` says so.
            eprintln!(
                "there is no Chromium here: the page's own text is looked at, no picture is taken"
            );
            text.clone()
        }
    };
    assert_eq!(dom.matches("<svg viewBox=\"0 0 640 400\" role=\"img\"").count(), 2, "{dom}");
    for colour in COLOURS {
        // The short ones are the legend's samples.
        let drawn: Vec<_> = curves(&dom, colour).into_iter().filter(|c| c.len() > 2).collect();
        assert_eq!(drawn.len(), 2, "{colour}: one per chart");
        for curve in drawn {
            assert_eq!(curve.len(), SIZES.len(), "{colour}: {curve:?}");
            for (x, y) in &curve {
                assert!((64.0..=640.0).contains(x) && (0.0..=356.0).contains(y), "{curve:?}");
            }
            // Each size is four times the last: on a logarithmic axis the steps are alike.
            let steps: Vec<f64> = curve.windows(2).map(|p| p[1].0 - p[0].0).collect();
            assert!(steps.iter().all(|s| *s > 20.0 && (s - steps[0]).abs() <= 1.5), "{steps:?}");
        }
    }
    for size in SIZES {
        assert!(dom.contains(&format!("<th scope=\"row\">{size}</th>")), "no row of {size}");
    }

    // That the elements are there does not show that they are seen: without them the picture must be another one.
    if let Some(browser) = browser {
        let seen = picture(browser, &folder, &text);
        assert_eq!(seen, picture(browser, &folder, &text), "two pictures of one page differ");
        let without = text.replace("<polyline", "<g");
        assert_ne!(seen, picture(browser, &folder, &without), "the curves cannot be seen");
        let blank = picture(browser, &folder, "<!DOCTYPE html><title>blank</title>");
        assert!(seen.len() > 5 * blank.len(), "{} bytes, of nothing {}", seen.len(), blank.len());
    }
}

#[test]
fn the_page_stands_alone_and_text_in_it_is_no_markup() {
    let folder = folder("alone");
    // A path is the part of the command that may hold anything.
    let hostile = folder.join("<script>alert(1)</script>&.json");
    std::fs::create_dir_all(hostile.parent().unwrap()).unwrap();
    let flags =
        format!("--ranks 2 --threads -b 64 -e 64 -n 3 --batches 3 --json {}", hostile.display());
    let (_, text) = page(&folder, &flags);
    assert!(!text.contains("<script"), "markup from the command line");
    assert!(text.contains("&lt;script&gt;alert(1)&lt;/script&gt;&amp;.json"));
    for outside in ["src=", "href=\"http", "url(", "@import", "<link rel=\"stylesheet"] {
        assert!(!text.contains(outside), "the page asks for something outside: {outside}");
    }
    for inside in ["<html lang=\"en\">", "<dt>Machine</dt>", "<dt>Version</dt>", "µs", "<caption>"]
    {
        assert!(text.contains(inside), "{inside} is missing");
    }
    assert!(text.contains(&format!("peerlane {}", env!("CARGO_PKG_VERSION"))));
}
