//! The scripts Redis runs. Each is one round trip and atomic; none walks a backlog.

use std::sync::LazyLock;

use redis::Script;

/// Adds jobs that do not wait in their lane yet.
///
/// KEYS: per job its lane, its note and the list of the lanes of its pool and class. ARGV: group, the
/// note's time to live in seconds, then per job its text and its code version or nothing. A note names the entry, so it blocks nothing for longer than the entry is there
///; nor while a worker has the job, for that worker may just be giving it back.
pub(super) static PUSH: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local added = 0
         local function waits(lane, entry)
           if not entry or #redis.call('XRANGE', lane, entry, entry) == 0 then return false end
           local pending = redis.pcall('XPENDING', lane, ARGV[1], entry, entry, 1)
           return pending.err or #pending == 0
         end
         for i = 1, #KEYS / 3 do
           local lane, note, text, version = KEYS[3 * i - 2], KEYS[3 * i - 1], ARGV[2 * i + 1], ARGV[2 * i + 2]
           if not waits(lane, redis.call('GET', note)) then
             redis.call('SET', note, redis.call('XADD', lane, '*', 'job', text), 'EX', ARGV[2])
             if version ~= '' then redis.call('SADD', KEYS[3 * i], version) end
             added = added + 1
           end
         end
         return added",
    )
});

/// Reads unread jobs, lane by lane, until it has enough; makes groups that are missing.
///
/// KEYS: lanes in order. ARGV: group, consumer, jobs in all, then per lane the most to take.
/// Answers pairs of a lane's place in KEYS and its entries.
pub(super) static TAKE: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local left, found = tonumber(ARGV[3]), {}
         local function read(lane, count)
           return redis.pcall('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', count, 'STREAMS', lane, '>')
         end
         for i, lane in ipairs(KEYS) do
           if left <= 0 then break end
           local count = math.min(left, tonumber(ARGV[3 + i]))
           local answer = read(lane, count)
           if answer and answer.err then
             redis.pcall('XGROUP', 'CREATE', lane, ARGV[1], '0', 'MKSTREAM')
             answer = read(lane, count)
           end
           if answer and not answer.err then
             local entries = answer[1][2]
             left = left - #entries
             found[#found + 1] = {i, entries}
           end
         end
         return found",
    )
});

/// Takes over jobs whose workers have been silent for too long, and finds out whether Redis takes
/// writes: without that an idle worker would not notice that nobody can send it anything.
///
/// KEYS: a key to write, then lanes. ARGV: group, consumer, jobs in all, silence in milliseconds.
/// Answers whether the write worked, and pairs of a lane's place and its entries, each with how
/// often it was delivered.
pub(super) static RECLAIM: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local left, found = tonumber(ARGV[3]), {}
         local written = redis.pcall('SET', KEYS[1], 1, 'EX', 60)
         for i = 2, #KEYS do
           local lane, cursor, entries = KEYS[i], '0-0', {}
           while left > 0 and cursor do
             local answer = redis.pcall('XAUTOCLAIM', lane, ARGV[1], ARGV[2], ARGV[4], cursor, 'COUNT', left)
             for _, entry in ipairs(answer.err and {} or answer[2]) do
               if entry and entry[2] then
                 local pending = redis.call('XPENDING', lane, ARGV[1], entry[1], entry[1], 1)
                 entries[#entries + 1] = {entry[1], entry[2], pending[1] and pending[1][4] or 1}
                 left = left - 1
               end
             end
             -- Each call looks at a few only, and long jobs that are in good hands come first.
             cursor = not answer.err and answer[1] ~= '0-0' and answer[1]
           end
           if #entries > 0 then found[#found + 1] = {i - 2, entries} end
         end
         return {written.err and 0 or 1, found}",
    )
});

/// Hands back a job that was read without a slot for it: unread again, at the lane's end.
///
/// KEYS: lane, note. ARGV: group, entry, text, the note's time to live in seconds.
pub(super) static HAND_BACK: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
         redis.call('XDEL', KEYS[1], ARGV[2])
         redis.call('SET', KEYS[2], redis.call('XADD', KEYS[1], '*', 'job', ARGV[3]), 'EX', ARGV[4])
         return 1",
    )
});

/// Counts unread jobs: all entries but those in a worker's hands.
///
/// KEYS: lanes. ARGV: group.
pub(super) static UNREAD: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local counts = {}
         for i, lane in ipairs(KEYS) do
           local pending = redis.pcall('XPENDING', lane, ARGV[1])
           local unread = redis.call('XLEN', lane) - (pending.err and 0 or pending[1])
           counts[i] = math.max(unread, 0)
         end
         return counts",
    )
});

/// [`UNREAD`] of all lanes of a pool and class, with the right to fill them; nothing while somebody
/// else has it. Forgets versions whose lanes are empty.
///
/// KEYS: the right's key, the list of code versions, the lane of declarative graphs. ARGV: group, who
/// asks, milliseconds the right lasts at most, what stands between that lane's key and a version.
/// Answers pairs of a version, or nothing, and a count.
pub(super) static BEGIN_FILLING: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "if not redis.call('SET', KEYS[1], ARGV[2], 'NX', 'PX', ARGV[3]) then return false end
         local function unread(lane)
           local pending = redis.pcall('XPENDING', lane, ARGV[1])
           return math.max(redis.call('XLEN', lane) - (pending.err and 0 or pending[1]), 0)
         end
         local found = {{'', unread(KEYS[3])}}
         for _, version in ipairs(redis.call('SMEMBERS', KEYS[2])) do
           local count = unread(KEYS[3] .. ARGV[4] .. version)
           if count > 0 then
             found[#found + 1] = {version, count}
           else
             redis.call('SREM', KEYS[2], version)
           end
         end
         return found",
    )
});

/// Gives the right back, if it is still the asker's.
///
/// KEYS: the right's key. ARGV: who had it.
pub(super) static END_FILLING: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
         return 0",
    )
});

/// Forgets consumers that have nothing pending: the one named, or all that have been silent; then
/// lanes without jobs and consumers, which a worker that still waits makes anew.
///
/// KEYS: lanes. ARGV: group, consumer or empty, silence in milliseconds.
pub(super) static FORGET: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local gone = 0
         for _, lane in ipairs(KEYS) do
           local left, consumers = 0, redis.pcall('XINFO', 'CONSUMERS', lane, ARGV[1])
           for _, row in ipairs(consumers.err and {} or consumers) do
             local consumer = {}
             for i = 1, #row, 2 do consumer[row[i]] = row[i + 1] end
             left = left + 1
             local leaves = consumer.name == ARGV[2] or (ARGV[2] == '' and consumer.idle > tonumber(ARGV[3]))
             if leaves and consumer.pending == 0 then
               redis.call('XGROUP', 'DELCONSUMER', lane, ARGV[1], consumer.name)
               gone, left = gone + 1, left - 1
             end
           end
           if left == 0 and redis.call('XLEN', lane) == 0 then redis.call('UNLINK', lane) end
         end
         return gone",
    )
});
