//! The parent of a run: starts the ranks, gives all of them the same orders, and takes the run down as a whole when one
//! of them fails, dies or falls silent.

use super::orders::{from_line, to_line, Answer, Order, Settings};
use super::rank::Rank;
use super::serve::{heartbeat, Member};
use anyhow::{anyhow, bail, Context, Result};
use peerlane::bootstrap::UniqueId;
use peerlane::comm::Communicator;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// How long after a first failure others may still say what they know: a rank's death is seen by its peers before the
/// parent has reaped it.
const GRACE: Duration = Duration::from_millis(1500);

enum Event {
    Answer(Answer),
    /// A rank ended or said something that is no answer; the reason where there is one.
    Gone(Option<String>),
}

enum Link {
    Process { child: Child, orders: ChildStdin },
    Thread { orders: Sender<Order> },
}

/// The ranks of a run.
pub struct Ranks {
    links: Vec<Link>,
    events: Receiver<(usize, Event)>,
    silence: Duration,
    size: usize,
}

impl Ranks {
    fn new(events: Receiver<(usize, Event)>, settings: &Settings) -> Self {
        Ranks { links: Vec::new(), events, silence: silence(settings), size: settings.ranks }
    }

    /// Who is at the end of a link, for people.
    fn who(&self, link: usize) -> String {
        match self.links.len() < self.size {
            true => "the thread of all ranks".into(),
            false => format!("rank {link}"),
        }
    }

    /// Starts the ranks as processes, copies of this program, and has them join one communicator.
    pub fn processes(settings: &Settings) -> Result<Self> {
        let id = UniqueId::in_dir(settings.config(0)?.run_dir.as_deref())?.to_string();
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let (tell, events) = channel();
        let mut ranks = Ranks::new(events, settings);
        for rank in 0..settings.ranks {
            let mut command = Command::new(&program);
            command.arg("bench-rank");
            let mut child =
                spawn_tied(command.stdin(Stdio::piped()).stdout(Stdio::piped()), libc::SIGKILL)
                    .with_context(|| format!("cannot start rank {rank} ({})", program.display()))?;
            let (Some(orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
                bail!("rank {rank} was started without pipes");
            };
            // In `links` before anything can fail, so that dropping `ranks` ends it.
            ranks.links.push(Link::Process { child, orders });
            let tell = tell.clone();
            std::thread::Builder::new().name(format!("answers-{rank}")).spawn(move || {
                let why = relay(rank, BufReader::new(answers), &tell);
                let _ = tell.send((rank, Event::Gone(why)));
            })?;
        }
        for rank in 0..settings.ranks {
            ranks.send(rank, &Order::Join { id: id.clone(), rank, settings: settings.clone() })?;
        }
        ranks.collect()?;
        Ok(ranks)
    }

    /// Starts the ranks in this process: on the CPU a thread each, on GPUs one thread that drives them all.
    pub fn threads(settings: &Settings) -> Result<Self> {
        let (tell, events) = channel();
        let mut ranks = Ranks::new(events, settings);
        for (number, member) in local_members(settings)?.into_iter().enumerate() {
            let (orders, inbox) = channel();
            let tell = tell.clone();
            std::thread::Builder::new()
                .name(format!("rank-{number}"))
                .spawn(move || thread_member(number, member, &inbox, tell))?;
            ranks.links.push(Link::Thread { orders });
        }
        Ok(ranks)
    }

    /// Process ids, where the ranks are processes.
    pub fn pids(&self) -> Vec<u32> {
        self.links
            .iter()
            .filter_map(|link| match link {
                Link::Process { child, .. } => Some(child.id()),
                Link::Thread { .. } => None,
            })
            .collect()
    }

    /// Gives every rank the same order and returns their answers, by rank.
    pub fn ask(&mut self, order: &Order) -> Result<Vec<Answer>> {
        for rank in 0..self.links.len() {
            self.send(rank, order)?;
        }
        self.collect()
    }

    /// Has the ranks leave their communicator, and processes end.
    pub fn leave(mut self) -> Result<()> {
        self.ask(&Order::Leave)?;
        for (rank, link) in std::mem::take(&mut self.links).into_iter().enumerate() {
            if let Link::Process { mut child, orders } = link {
                drop(orders);
                let status = child.wait()?;
                if !status.success() {
                    bail!("rank {rank} {} after it had left", ending(status));
                }
            }
        }
        Ok(())
    }

    fn send(&mut self, rank: usize, order: &Order) -> Result<()> {
        let sent = match &mut self.links[rank] {
            Link::Process { orders, .. } => {
                orders.write_all(to_line(order)?.as_bytes()).and_then(|()| orders.flush()).is_ok()
            }
            Link::Thread { orders } => orders.send(order.clone()).is_ok(),
        };
        match sent {
            true => Ok(()),
            false => Err(self.fail(rank, None)),
        }
    }

    fn collect(&mut self) -> Result<Vec<Answer>> {
        let n = self.links.len();
        let mut answers: Vec<Option<Answer>> = vec![None; n];
        let mut heard = vec![Instant::now(); n];
        while let Some(silent) = (0..n).find(|&r| answers[r].is_none()) {
            match self.events.recv_timeout(Duration::from_secs(1)) {
                Ok((rank, event)) => {
                    heard[rank] = Instant::now();
                    match event {
                        Event::Answer(Answer::Busy) => {}
                        Event::Answer(Answer::Failed { why }) => {
                            return Err(self.fail(rank, Some(why)))
                        }
                        Event::Answer(answer) => answers[rank] = Some(answer),
                        // A rank that has left ends before the last one has left.
                        Event::Gone(_) if answers[rank] == Some(Answer::Left) => {}
                        Event::Gone(why) => return Err(self.gone(rank, why)),
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    let waiting = (0..n).filter(|&r| answers[r].is_none());
                    if let Some(rank) =
                        waiting.into_iter().find(|&r| heard[r].elapsed() > self.silence)
                    {
                        bail!(
                            "{} has said nothing for {:.0} s, though its waits should have ended by then",
                            self.who(rank),
                            self.silence.as_secs_f64()
                        );
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.gone(silent, None));
                }
            }
        }
        answers.into_iter().map(|a| a.ok_or_else(|| anyhow!("an answer was lost"))).collect()
    }

    /// The run's error after rank `first` failed: a rank that died explains what the others complain of.
    fn fail(&mut self, first: usize, why: Option<String>) -> anyhow::Error {
        let mut said: Vec<Option<String>> = vec![None; self.links.len()];
        said[first] = why;
        let end = Instant::now() + GRACE;
        while said.iter().any(Option::is_none) {
            let left = end.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                // A rank that has reported its error ends next, as it should.
                Ok((rank, Event::Gone(_))) if said[rank].is_some() => {}
                Ok((rank, Event::Gone(why))) => {
                    let died = self.gone(rank, why);
                    return match said.iter().position(Option::is_some) {
                        Some(other) => {
                            let complaint = said[other].take().unwrap_or_default();
                            anyhow!("{died}; rank {other}: {complaint}")
                        }
                        None => died,
                    };
                }
                Ok((rank, Event::Answer(Answer::Failed { why }))) => said[rank] = Some(why),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        match said.iter_mut().enumerate().find_map(|(rank, why)| Some((rank, why.take()?))) {
            Some((rank, why)) => anyhow!("{}: {why}", self.who(rank)),
            None => self.gone(first, None),
        }
    }

    /// The error that rank `rank` ended before its time.
    fn gone(&mut self, rank: usize, why: Option<String>) -> anyhow::Error {
        let how = match &mut self.links[rank] {
            Link::Process { child, .. } => match wait_briefly(child) {
                Some(status) => ending(status),
                None => "closed its pipe".into(),
            },
            Link::Thread { .. } => "ended in a panic".into(),
        };
        match why {
            Some(why) => anyhow!("{} {how}: {why}", self.who(rank)),
            None => anyhow!("{} {how}", self.who(rank)),
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for link in &mut self.links {
            if let Link::Process { child, .. } = link {
                // Errors mean that it has ended already.
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

/// The longest a rank may be silent. A wait ends by the deadline, but what a rank does between two words may be several
/// waits, each of them almost as long, and the check of a large message, which on a machine with more to do take minutes.
fn silence(settings: &Settings) -> Duration {
    Duration::from_secs_f64(2.0 * settings.deadline) + Duration::from_secs(120)
}

/// Passes on a rank's answers until its pipe ends; the reason if it was not the end of the pipe.
fn relay(rank: usize, answers: impl BufRead, tell: &Sender<(usize, Event)>) -> Option<String> {
    for line in answers.lines() {
        match line.map_err(anyhow::Error::from).and_then(|line| from_line(&line)) {
            Ok(answer) => tell.send((rank, Event::Answer(answer))).ok()?,
            Err(error) => return Some(format!("{error:#}")),
        }
    }
    None
}

/// All ranks of a communicator as members of this process, for a thread each.
fn local_members(settings: &Settings) -> Result<Vec<Member>> {
    #[cfg(feature = "cuda")]
    if settings.gpu.is_some() {
        let id = UniqueId::in_dir(settings.config(0)?.run_dir.as_deref())?;
        let ranks = super::gpu::GpuRanks::join(&id, 0..settings.ranks, settings)?;
        return Ok(vec![Member::Gpu(Box::new(ranks))]);
    }
    let ranks = Communicator::create_local(settings.ranks, &settings.config(0)?)?;
    Ok(ranks.into_iter().map(|rank| Member::Cpu(Rank::new(rank, settings.seed))).collect())
}

fn thread_member(
    number: usize,
    mut rank: Member,
    inbox: &Receiver<Order>,
    tell: Sender<(usize, Event)>,
) {
    /// Reports the end of the thread even when it unwinds.
    struct Farewell(usize, Sender<(usize, Event)>);
    impl Drop for Farewell {
        fn drop(&mut self) {
            let _ = self.1.send((self.0, Event::Gone(None)));
        }
    }
    let farewell = Farewell(number, tell);
    let send = |answer| farewell.1.send((number, Event::Answer(answer))).is_ok();
    while let Ok(order) = inbox.recv() {
        let outcome = match order {
            Order::Leave => {
                let outcome = rank.leave();
                send(outcome.unwrap_or_else(|e| Answer::Failed { why: format!("{e:#}") }));
                return;
            }
            order => rank.obey(
                &order,
                &mut heartbeat(|| {
                    // The parent's end shows when the order is done.
                    let _ = send(Answer::Busy);
                }),
            ),
        };
        let failed = outcome.is_err();
        let told = send(outcome.unwrap_or_else(|e| Answer::Failed { why: format!("{e:#}") }));
        if failed || !told {
            return;
        }
    }
}

/// Starts a child that gets `signal` when this thread ends, however it ends: an interrupted run leaves nothing behind.
/// Call it from the main thread.
pub fn spawn_tied(command: &mut Command, signal: libc::c_int) -> std::io::Result<Child> {
    let parent = std::process::id() as libc::pid_t;
    // SAFETY: between fork and exec the closure makes two system calls and touches no memory but its own stack.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, signal) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // The parent may have died before the line above.
            if libc::getppid() != parent {
                return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
    command.spawn()
}

/// The status of a child that has closed its pipe and so is about to end.
pub fn wait_briefly(child: &mut Child) -> Option<ExitStatus> {
    for _ in 0..100 {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    None
}

/// How a process ended, in words.
pub fn ending(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit status {code}"),
        (None, Some(libc::SIGKILL)) => "was killed by signal 9 (SIGKILL)".into(),
        (None, Some(libc::SIGSEGV)) => "was killed by signal 11 (SIGSEGV)".into(),
        (None, Some(libc::SIGBUS)) => "was killed by signal 7 (SIGBUS)".into(),
        (None, Some(libc::SIGABRT)) => "was killed by signal 6 (SIGABRT)".into(),
        (None, signal) => format!("was killed by signal {}", signal.unwrap_or(0)),
    }
}
