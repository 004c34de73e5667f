//! A folder of safetensors files, mapped into memory: a rank touches only the pages of its own part.

use super::{fp8, Part};
use anyhow::{bail, ensure, Context, Result};
use memmap2::Mmap;
use safetensors::tensor::{Dtype, Metadata, SafeTensorError, SafeTensors};
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    file: usize,
    /// Where its bytes begin in the file.
    start: usize,
}

pub struct Checkpoint {
    folder: PathBuf,
    maps: Vec<Mmap>,
    tensors: HashMap<String, Tensor>,
}

impl Checkpoint {
    pub fn open(folder: &Path) -> Result<Self> {
        let entries = std::fs::read_dir(folder).context("cannot read this folder")?;
        let mut files = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                files.push(path);
            }
        }
        files.sort();
        ensure!(!files.is_empty(), "there is no .safetensors file in this folder");
        let mut checkpoint =
            Checkpoint { folder: folder.into(), maps: Vec::new(), tensors: HashMap::new() };
        for path in &files {
            checkpoint.map(path).with_context(|| path.display().to_string())?;
        }
        Ok(checkpoint)
    }

    fn map(&mut self, path: &Path) -> Result<()> {
        let file = File::open(path).context("cannot open it")?;
        // SAFETY: the map is read-only. Another process that cuts the file short while this one reads would end it with
        // SIGBUS, which no reader of a mapped file can exclude; values that change under way are only other values.
        let map = unsafe { Mmap::map(&file) }.context("cannot map it")?;
        let (header, metadata) = parse(&map)?;
        for (name, info) in metadata.tensors() {
            let tensor = Tensor {
                dtype: info.dtype,
                shape: info.shape.clone(),
                file: self.maps.len(),
                start: 8 + header + info.data_offsets.0,
            };
            if let Some(twice) = self.tensors.insert(name.clone(), tensor) {
                bail!("tensor {name} is there twice, also in file {} of the folder", twice.file);
            }
        }
        self.maps.push(map);
        Ok(())
    }

    pub fn append(&self, values: &mut Vec<f32>, part: &Part) -> Result<()> {
        // Multi-modal models put the language model below a prefix.
        let prefixed = format!("language_model.{}", part.name);
        let (name, tensor) = match self.tensors.get_key_value(part.name) {
            Some(found) => found,
            None => match self.tensors.get_key_value(&prefixed) {
                Some(found) => found,
                None => bail!("{}", self.missing(part.name)),
            },
        };
        let fits = match tensor.shape[..] {
            [elements] => part.shape == [1, elements],
            [rows, columns] => part.shape == [rows, columns],
            _ => false,
        };
        if !fits {
            let wanted = match part.shape {
                [1, elements] => format!("[{elements}]"),
                [rows, columns] => format!("[{rows}, {columns}]"),
            };
            bail!(
                "tensor {name} has the shape {:?}, but the configuration asks for {wanted}",
                tensor.shape
            );
        }
        let bytes = &self.maps[tensor.file][tensor.start..];
        let scale = match tensor.dtype {
            Dtype::F8_E4M3 => Some(self.scale(name, part)?),
            _ => None,
        };
        for row in part.rows.clone() {
            let from = row * part.shape[1];
            let (from, to) = (from + part.columns.start, from + part.columns.end);
            match tensor.dtype {
                Dtype::F32 => values.extend(
                    bytes[from * 4..to * 4]
                        .chunks_exact(4)
                        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
                ),
                Dtype::BF16 => values.extend(
                    bytes[from * 2..to * 2]
                        .chunks_exact(2)
                        .map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()),
                ),
                Dtype::F16 => values.extend(
                    bytes[from * 2..to * 2]
                        .chunks_exact(2)
                        .map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()),
                ),
                Dtype::F8_E4M3 => {
                    let scale = scale.as_deref().unwrap_or_default();
                    let across = part.shape[1].div_ceil(fp8::BLOCK);
                    let scale = &scale[row / fp8::BLOCK * across..];
                    values.extend(
                        bytes[from..to]
                            .iter()
                            .zip(part.columns.clone())
                            .map(|(&b, column)| fp8::decode(b) * scale[column / fp8::BLOCK]),
                    );
                }
                other => bail!(
                    "tensor {name} holds {other}; this runner reads F32, F16, BF16 and F8_E4M3"
                ),
            }
        }
        Ok(())
    }

    /// The scales of a matrix of 8-bit floats, one for each block.
    fn scale(&self, name: &str, part: &Part) -> Result<Vec<f32>> {
        let scale = format!("{name}_scale_inv");
        let shape = part.shape.map(|elements| elements.div_ceil(fp8::BLOCK));
        let mut values = Vec::new();
        ensure!(self.tensors.contains_key(&scale), "{}", self.missing(&scale));
        self.append(&mut values, &Part::whole(&scale, shape))?;
        Ok(values)
    }

    fn missing(&self, name: &str) -> String {
        let packed = name.replace(".weight", ".weight_packed");
        let hint = if self.tensors.contains_key(&packed) {
            ", but a packed INT4 one, which this runner does not read"
        } else {
            ""
        };
        format!(
            "there is no tensor {name} in the {} safetensors file(s) of {}{hint}",
            self.maps.len(),
            self.folder.display()
        )
    }
}

/// Bytes of the header, and what it says; the data must fill the file exactly.
fn parse(bytes: &[u8]) -> Result<(usize, Metadata)> {
    SafeTensors::read_metadata(bytes).map_err(|error| {
        use SafeTensorError::*;
        let announced = bytes.first_chunk().map(|length| u64::from_le_bytes(*length));
        match error {
            MetadataIncompleteBuffer | HeaderTooSmall | InvalidHeaderLength => anyhow::anyhow!(
                "not a whole safetensors file ({error}): {} bytes, header of {} bytes; was it cut short?",
                bytes.len(),
                announced.map_or("unknown".into(), |length| length.to_string())
            ),
            other => anyhow::anyhow!("not a safetensors file: {other}"),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;

    fn folder(tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let views = tensors.iter().map(|(name, dtype, shape, data)| {
            (*name, TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        let file = folder.path().join("model.safetensors");
        safetensors::serialize_to_file(views, None, &file).unwrap();
        folder
    }

    #[test]
    fn eight_bit_floats_are_scaled_by_their_block() {
        let (rows, columns) = (130, 140);
        let bytes: Vec<u8> = (0..rows * columns).map(|i| (i * 7 % 120) as u8).collect();
        let scales: Vec<u8> =
            [0.5f32, 2.0, 4.0, 8.0].iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let folder = folder(&[
            ("a.weight", Dtype::F8_E4M3, vec![rows, columns], bytes.clone()),
            ("a.weight_scale_inv", Dtype::F32, vec![2, 2], scales),
        ]);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let mut values = Vec::new();
        let part = Part::whole("a.weight", [rows, columns]).rows(126..130).columns(120..140);
        checkpoint.append(&mut values, &part).unwrap();
        for (at, value) in values.iter().enumerate() {
            let (row, column) = (126 + at / 20, 120 + at % 20);
            let scale = [[0.5, 2.0], [4.0, 8.0]][row / 128][column / 128];
            assert_eq!(*value, fp8::decode(bytes[row * columns + column]) * scale);
        }
    }

    #[test]
    fn a_type_that_is_not_read_and_a_missing_scale_are_named() {
        let folder = folder(&[
            ("i", Dtype::I32, vec![1], vec![0; 4]),
            ("q.weight", Dtype::F8_E4M3, vec![2, 2], vec![0; 4]),
            ("p.weight_packed", Dtype::I32, vec![1], vec![0; 4]),
        ]);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        for (name, shape, what) in [
            ("i", [1, 1], "holds I32"),
            ("q.weight", [2, 2], "no tensor q.weight_scale_inv"),
            ("p.weight", [2, 2], "packed INT4"),
        ] {
            let error = checkpoint.append(&mut Vec::new(), &Part::whole(name, shape)).unwrap_err();
            assert!(error.to_string().contains(what), "{error}");
        }
    }
}
