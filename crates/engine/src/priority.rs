//! The priority of threads: whatever is not the engine's own computing gives way to it.

/// Lowers the priority of the calling thread by so many steps of `nice`. Where the system has no priorities of single
/// threads, nothing happens: the promise is to be polite, and nothing depends on it.
pub fn lower_priority(nice: i32) {
    #[cfg(target_os = "linux")]
    {
        // On Linux this is the priority of the calling thread, not of the process.
        let now = rustix::process::getpriority_process(None).unwrap_or(0);
        let _ = rustix::process::setpriority_process(None, (now + nice).min(19));
    }
    #[cfg(not(target_os = "linux"))]
    let _ = nice;
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn only_the_calling_thread_is_lowered() {
        let priority = || rustix::process::getpriority_process(None).expect("a priority");
        let before = priority();
        let lowered = std::thread::spawn(move || {
            lower_priority(3);
            priority()
        });
        assert_eq!(lowered.join().expect("no panic"), (before + 3).min(19));
        assert_eq!(priority(), before);
    }
}
