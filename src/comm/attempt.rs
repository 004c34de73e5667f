//! Outcomes of set-up that are no end of it: what one rank could not do, all ranks learn, and all try the next lane.

use crate::bootstrap::Mesh;
use crate::error::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// What a rank could not do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Failed {
    pub error: Error,
    /// The GPU has no room for another peer; a schedule with fewer may work.
    pub too_many_peers: bool,
    /// Something was written over the lane and did not come, or came changed.
    pub lane_is_broken: bool,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        let lane_is_broken = matches!(error, Error::Lane(_) | Error::Deadline { .. });
        Failed { error, too_many_peers: false, lane_is_broken }
    }
}

pub(crate) type Outcome<T> = std::result::Result<T, Failed>;

impl Failed {
    /// Whether it may only be what another rank's failure looks like from here.
    fn may_follow(&self) -> bool {
        matches!(
            self.error,
            Error::Aborted { .. } | Error::RankDied { .. } | Error::Deadline { .. }
        )
    }
}

/// Ends a stage of an attempt. Everybody's values if all have one, else one rank's failure, the same on all ranks: the
/// first, in order, that is a cause.
///
/// # Errors
/// The outer one is the end of set-up: a rank died.
pub(crate) fn agree<T: Serialize + DeserializeOwned>(
    mesh: &mut Mesh,
    stage: &'static str,
    mine: Outcome<T>,
) -> Result<Outcome<Vec<T>>> {
    let all: Vec<Outcome<T>> = mesh.all_gather(stage, Ok(mine))?;
    let failures =
        || all.iter().enumerate().filter_map(|(rank, o)| Some((rank, o.as_ref().err()?)));
    // A rank that was told to stop knows less than one that waited in vain.
    let cause = failures()
        .find(|(_, failed)| !failed.may_follow())
        .or_else(|| failures().find(|(_, failed)| failed.lane_is_broken))
        .or_else(|| failures().next());
    if let Some((rank, failed)) = cause {
        let (rank, stage, reason) = (rank as u32, stage.to_owned(), failed.error.to_string());
        return Ok(Err(Failed { error: Error::Setup { rank, stage, reason }, ..failed.clone() }));
    }
    Ok(all.into_iter().collect())
}
