//! Connections that are none of ours, and names that are in the way.

use crate::support::*;
use peerlane::bootstrap::{Mesh, UniqueId};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

/// A rendezvous of two ranks during which `stranger` plays with the socket; rank 1 comes when it is done.
fn disturbed(stranger: impl Fn(&UniqueId, &Path) -> Vec<UnixStream> + Sync) {
    let dir = Dir::new();
    let id = dir.id();
    threads(2, |rank| {
        let mut kept = Vec::new();
        if rank == 1 {
            let socket = socket_of(&id);
            eventually(|| UnixStream::connect(&socket).is_ok());
            kept = stranger(&id, &socket);
        }
        let mut mesh = Mesh::connect(&id, 2, rank, LONG).unwrap();
        assert_eq!(mesh.all_gather("after", Ok(rank)).unwrap(), [0, 1]);
        drop(kept);
    });
    dir.assert_empty();
}

/// The first bytes of a rank: magic, version 2, rank 1, token. The token lies at byte 16 of an id.
fn opening(id: &UniqueId) -> Vec<u8> {
    let mut bytes = b"pl-rdv\r\n".to_vec();
    bytes.extend([2, 0, 0, 0, 1, 0, 0, 0]);
    bytes.extend(&id.as_bytes()[16..32]);
    bytes
}

/// Whether the other side has closed, waiting for it.
fn is_closed(mut stream: &UnixStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    match stream.read(&mut [0; 1]) {
        Ok(got) => got == 0,
        Err(e) => e.raw_os_error() == Some(libc::ECONNRESET),
    }
}

#[test]
fn silent_clients_keep_nobody_out_however_many() {
    disturbed(|_, socket| {
        (0..200)
            .map(|_| loop {
                // The queue may be full for a moment.
                if let Ok(stream) = UnixStream::connect(socket) {
                    break stream;
                }
            })
            .collect()
    });
}

#[test]
fn garbage_is_dropped() {
    disturbed(|_, socket| {
        for length in [1, 31, 32, 33, 4096] {
            let mut stream = UnixStream::connect(socket).unwrap();
            let garbage: Vec<u8> = (0..length).map(|i| (i * 37 % 251) as u8).collect();
            stream.write_all(&garbage).unwrap();
            assert!(length < 32 || is_closed(&stream));
        }
        Vec::new()
    });
}

#[test]
fn a_wrong_token_is_dropped_and_the_right_one_is_not() {
    disturbed(|id, socket| {
        let mut right = UnixStream::connect(socket).unwrap();
        right.write_all(&opening(id)).unwrap();
        for at in 16..32 {
            let mut bytes = opening(id);
            bytes[at] ^= 1;
            let mut wrong = UnixStream::connect(socket).unwrap();
            wrong.write_all(&bytes).unwrap();
            assert!(is_closed(&wrong), "byte {at}");
        }
        // Control: the same bytes with the right token are waited for.
        right.set_nonblocking(true).unwrap();
        let error = right.read(&mut [0; 1]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
        vec![right]
    });
}

#[test]
fn oversized_and_senseless_hellos_are_dropped() {
    disturbed(|id, socket| {
        let frames: [(u32, u32, Vec<u8>); 4] = [
            (u32::MAX, 0, vec![0; 100]),
            (4097, 0, vec![0; 4097]),
            (3, 0, vec![0xff; 3]),
            (0, u32::MAX, vec![]),
        ];
        for (length, fds, body) in frames {
            let mut stream = UnixStream::connect(socket).unwrap();
            let mut bytes = opening(id);
            bytes.extend(length.to_le_bytes());
            bytes.extend(fds.to_le_bytes());
            bytes.extend(body);
            stream.write_all(&bytes).unwrap();
            assert!(is_closed(&stream), "{length} {fds}");
        }
        Vec::new()
    });
}

#[test]
fn another_version_of_the_protocol_is_named_and_not_dropped() {
    let dir = Dir::new();
    let id = dir.id();
    let results = threads(2, |rank| {
        if rank == 0 {
            return Some(Mesh::connect(&id, 2, 0, LONG).unwrap_err());
        }
        let socket = socket_of(&id);
        eventually(|| UnixStream::connect(&socket).is_ok());
        let mut stream = UnixStream::connect(&socket).unwrap();
        let mut bytes = opening(&id);
        bytes[8] = 9;
        stream.write_all(&bytes).unwrap();
        assert_ne!(stream.read(&mut [0; 8]).unwrap(), 0, "it is told");
        None
    });
    let error = results.into_iter().flatten().next().unwrap();
    assert_setup(&error, 1, "rendezvous", "version 9 of the bootstrap protocol");
}

#[test]
fn a_name_in_the_way_is_an_error_on_all_and_is_not_followed() {
    type Plant = fn(&Path, &Path);
    let plants: [(&str, Plant); 4] = [
        ("file", |path, _| std::fs::write(path, "").unwrap()),
        ("directory", |path, _| std::fs::create_dir(path).unwrap()),
        ("link", |path, to| std::os::unix::fs::symlink(to, path).unwrap()),
        ("socket", |path, _| drop(UnixListener::bind(path).unwrap())),
    ];
    for (what, plant) in plants {
        let dir = Dir::new();
        let id = dir.id();
        let elsewhere = dir.0.join("elsewhere");
        plant(&socket_of(&id), &elsewhere);
        let results = threads(2, |rank| Mesh::connect(&id, 2, rank, Duration::from_secs(3)));
        for result in results {
            let error = result.unwrap_err();
            let text = error.to_string();
            assert!(text.contains("rank 0 in stage 'rendezvous'"), "{what}: {text}");
        }
        assert!(!elsewhere.exists());
        // A dead socket is cleaned away; what is no socket is not ours to remove.
        assert_eq!(dir.entries().is_empty(), what == "socket", "{what}");
    }
}

#[test]
fn a_run_directory_that_others_can_enter_is_refused_on_every_rank() {
    use std::os::unix::fs::PermissionsExt;
    let dir = Dir::new();
    let id = dir.id();
    std::fs::set_permissions(&dir.0, std::fs::Permissions::from_mode(0o755)).unwrap();
    for rank in 0..2 {
        let error = Mesh::connect(&id, 2, rank, LONG).unwrap_err().to_string();
        assert!(error.contains("chmod 700"), "{error}");
    }
    // Control: closed again, it serves.
    std::fs::set_permissions(&dir.0, std::fs::Permissions::from_mode(0o700)).unwrap();
    threads(2, |rank| Mesh::connect(&id, 2, rank, LONG).unwrap());
}
