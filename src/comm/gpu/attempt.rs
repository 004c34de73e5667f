//! Outcomes of set-up that are no end of it: what one rank could not do, all ranks learn, and all try the next lane.

use crate::bootstrap::Mesh;
use crate::error::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// What a rank could not do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Failed {
    pub error: Error,
    /// The GPU has no room for another peer; a schedule with fewer may work.
    pub too_many_peers: bool,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Failed { error, too_many_peers: false }
    }
}

pub(super) type Outcome<T> = std::result::Result<T, Failed>;

/// Ends a stage of an attempt. Everybody's values if all have one, else the first rank's failure, the same on all ranks.
///
/// # Errors
/// The outer one is the end of set-up: a rank died.
pub(super) fn agree<T: Serialize + DeserializeOwned>(
    mesh: &mut Mesh,
    stage: &'static str,
    mine: Outcome<T>,
) -> Result<Outcome<Vec<T>>> {
    let all: Vec<Outcome<T>> = mesh.all_gather(stage, Ok(mine))?;
    let mut values = Vec::with_capacity(all.len());
    for (rank, outcome) in all.into_iter().enumerate() {
        match outcome {
            Ok(value) => values.push(value),
            Err(Failed { error, too_many_peers }) => {
                let (rank, stage) = (rank as u32, stage.to_owned());
                let error = Error::Setup { rank, stage, reason: error.to_string() };
                return Ok(Err(Failed { error, too_many_peers }));
            }
        }
    }
    Ok(Ok(values))
}
