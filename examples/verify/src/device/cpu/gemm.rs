//! Matrix products, by the crate `matrixmultiply`.

use anyhow::{ensure, Result};

/// Products that are added one after the other before their sum is added to the result. The error of a sum in fp32 grows with
/// the longest chain of additions: with the whole of `k` in one chain, logits of the golden data are 1.4e-5 off.
const CHAIN: usize = 32;

/// A matrix inside a slice: element (i, j) is at `i * row + j * column`.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pub values: &'a [f32],
    pub row: usize,
    pub column: usize,
}

impl<'a> View<'a> {
    /// Row-major, rows `row` elements apart.
    pub fn rows(values: &'a [f32], row: usize) -> Self {
        View { values, row, column: 1 }
    }

    /// The transpose of a row-major matrix with rows `row` elements apart.
    pub fn transposed(values: &'a [f32], row: usize) -> Self {
        View { values, row: 1, column: row }
    }
}

/// Whether a matrix of this size lies within `len` elements.
fn inside(len: usize, rows: usize, columns: usize, row: usize, column: usize) -> bool {
    rows == 0 || columns == 0 || (rows - 1) * row + (columns - 1) * column < len
}

/// `out = a b`, with `a` [m, k], `b` [k, n] and `out` [m, n] in rows `out_row` elements apart.
pub fn multiply(
    (m, k, n): (usize, usize, usize),
    a: View,
    b: View,
    out: &mut [f32],
    out_row: usize,
) -> Result<()> {
    ensure!(
        inside(a.values.len(), m, k, a.row, a.column)
            && inside(b.values.len(), k, n, b.row, b.column)
            && inside(out.len(), m, n, out_row, 1)
            && (m <= 1 || n <= out_row),
        "a product [{m}, {k}] [{k}, {n}] of buffers of {}, {} and {} elements",
        a.values.len(),
        b.values.len(),
        out.len()
    );
    for first in (0..k).step_by(CHAIN) {
        // SAFETY: every element of the three matrices lies within its slice, as checked above; rows of `out` do not
        // overlap, and `out` is borrowed alone.
        unsafe {
            matrixmultiply::sgemm(
                m,
                (k - first).min(CHAIN),
                n,
                1.0,
                a.values.as_ptr().add(first * a.column),
                a.row as isize,
                a.column as isize,
                b.values.as_ptr().add(first * b.row),
                b.row as isize,
                b.column as isize,
                if first == 0 { 0.0 } else { 1.0 },
                out.as_mut_ptr(),
                out_row as isize,
                1,
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strided_products_are_those_of_the_definition() {
        let (m, k, n) = (3, 5, 4);
        let a: Vec<f32> = (0..m * 7).map(|i| i as f32 - 9.0).collect();
        let b: Vec<f32> = (0..n * 6).map(|i| (i * i % 11) as f32).collect();
        let mut out = vec![f32::NAN; m * 9];
        multiply((m, k, n), View::rows(&a, 7), View::transposed(&b, 6), &mut out, 9).unwrap();
        for i in 0..m {
            for j in 0..n {
                let sum: f32 = (0..k).map(|l| a[i * 7 + l] * b[j * 6 + l]).sum();
                assert_eq!(out[i * 9 + j], sum);
            }
            assert!(out[i * 9 + n..(i + 1) * 9].iter().all(|v| v.is_nan()), "written beside it");
        }
    }

    #[test]
    fn a_matrix_beyond_its_buffer_is_refused() {
        let (a, b, mut out) = (vec![0.0; 14], vec![0.0; 15], vec![0.0; 9]);
        let shape = (3, 5, 3);
        assert!(multiply(shape, View::rows(&a, 5), View::rows(&b, 3), &mut out, 3).is_err());
        let a = vec![0.0; 15];
        assert!(multiply(shape, View::rows(&a, 5), View::rows(&b, 3), &mut out, 3).is_ok());
        assert!(multiply(shape, View::rows(&a, 5), View::rows(&b, 3), &mut out, 4).is_err());
    }
}
