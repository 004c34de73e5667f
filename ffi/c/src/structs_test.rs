//! The header as a C compiler reads it against the Rust side.

use super::*;
use crate::status::Status;
use peerlane_core::types::MAX_RANKS;
use peerlane_core::{DType, Op};
use std::fmt::Write;
use std::process::Command;

/// Evaluates expressions as a C compiler does that has read the header.
fn by_the_header(expressions: &[String]) -> Vec<i64> {
    let dir = tempfile::tempdir().unwrap();
    let (source, program) = (dir.path().join("values.c"), dir.path().join("values"));
    let mut code = "#include <peerlane.h>\n#include <stdio.h>\nint main(void) {\n".to_owned();
    for expression in expressions {
        writeln!(code, "printf(\"%lld\\n\", (long long)({expression}));").unwrap();
    }
    std::fs::write(&source, code + "return 0; }\n").unwrap();
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/../../include");
    let compiled =
        Command::new("cc").args(["-I", include, "-o"]).arg(&program).arg(&source).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&program).output().unwrap();
    String::from_utf8(output.stdout).unwrap().lines().map(|l| l.parse().unwrap()).collect()
}

#[track_caller]
fn agree(pairs: Vec<(String, i64)>) {
    let (expressions, values): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    for ((found, value), expression) in
        by_the_header(&expressions).into_iter().zip(values).zip(expressions)
    {
        assert_eq!(found, value, "{expression} (left: the header, right: Rust)");
    }
}

#[test]
fn structs_have_the_layout_of_the_header() {
    macro_rules! layout {
        ($rust:ty, $c:literal: $($field:ident)*) => {
            agree(vec![
                (format!("sizeof({})", $c), size_of::<$rust>() as i64),
                (format!("_Alignof({})", $c), align_of::<$rust>() as i64),
                $((format!("offsetof({}, {})", $c, stringify!($field)), offset_of!($rust, $field) as i64),)*
            ])
        };
    }
    layout!(RawConfig, "peerlane_config": size islands slab_bytes deadline_seconds setup_deadline_seconds algorithm
        protocol direction check run_dir device device_ordinal lane reserved);
    layout!(RawStats, "peerlane_stats": size calls steps bytes failed tree_hash by_algorithm by_protocol);
    layout!(crate::norm::RawAddRmsNorm, "peerlane_add_rms_norm": size input residual gamma normed residual_out rows width
        dtype eps weight_bias unfused);
    layout!([u8; peerlane_core::bootstrap::UNIQUE_ID_BYTES], "peerlane_unique_id":);
}

#[test]
fn enumerators_have_the_numbers_of_the_header() {
    fn pairs<T: Copy + std::fmt::Debug>(
        all: &[T],
        number: impl Fn(T) -> i64,
        name: impl Fn(&str) -> String,
    ) -> Vec<(String, i64)> {
        all.iter().map(|&v| (format!("PEERLANE_{}", name(&format!("{v:?}"))), number(v))).collect()
    }
    /// `OneShot` as `ONE_SHOT`.
    fn upper(name: &str) -> String {
        let mut out = String::new();
        for c in name.chars() {
            if c.is_uppercase() && !out.is_empty() {
                out.push('_');
            }
            out.extend(c.to_uppercase());
        }
        out
    }
    agree(pairs(
        Status::ALL,
        |s| s as i64,
        |name| match name {
            "Success" => "SUCCESS".to_owned(),
            error => format!("ERROR_{}", upper(error)),
        },
    ));
    agree(pairs(
        DType::ALL,
        |d| d as i64,
        |name| {
            let (kind, bits) = name.split_at(name.find(|c: char| c.is_ascii_digit()).unwrap());
            let kind = match kind {
                "I" => "INT",
                "U" => "UINT",
                "F" => "FLOAT",
                "BF" => "BFLOAT",
                other => panic!("{other}"),
            };
            format!("{kind}{bits}")
        },
    ));
    agree(pairs(Op::ALL, |v| v as i64, upper));
    agree(pairs(Algorithm::ALL, |v| v as i64, upper));
    agree(pairs(Protocol::ALL, |v| v as i64, upper));
    agree(pairs(Direction::ALL, |v| v as i64, upper));
    agree(pairs(Lane::ALL, |v| v as i64, |name| format!("LANE_{}", upper(name))));
    agree(vec![
        ("PEERLANE_MAX_RANKS".to_owned(), MAX_RANKS as i64),
        ("sizeof(peerlane_status)".to_owned(), size_of::<Status>() as i64),
        ("sizeof(peerlane_dtype)".to_owned(), size_of::<i32>() as i64),
        ("sizeof(peerlane_comm_t)".to_owned(), size_of::<usize>() as i64),
    ]);
}

#[test]
fn text_is_cut_at_a_whole_character_and_always_ends() {
    let write = |capacity: usize| {
        let mut buffer = [b'#'; 8];
        // SAFETY: the buffer has 8 bytes, and no test passes more.
        unsafe { TextOut(buffer.as_mut_ptr()).write("a\u{e9}z", capacity) };
        buffer
    };
    assert_eq!(&write(0), b"########");
    assert_eq!(&write(1), b"\0#######");
    assert_eq!(&write(2), b"a\0######");
    assert_eq!(&write(3), b"a\0######");
    assert_eq!(&write(4), b"a\xc3\xa9\0####");
    assert_eq!(&write(8), b"a\xc3\xa9z\0###");
}
