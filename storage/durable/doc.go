// Package durable keeps an image store of containers/storage whole: across power
// cuts, crashes of this and of other processes, and beside other programs that use
// the store at the same time.
//
// containers/storage syncs the content of layers but not all of its records, and does not
// know after a power cut what has reached the disk. It waits for locks without limit, and
// it leaves layers behind when its process dies. Three types make up for that:
//
//   - Manifest is a durable copy of the store's records: of every layer that it lists
//     the content is on the disk. When the store is opened, Restore replaces record
//     files that are damaged, and Check, the post-crash check, compares what the
//     manifest does not list with its digests. Write makes a new one after each pull.
//   - Leftovers keeps account of work under way (Job), so that what unfinished work
//     has made is deleted, and nothing else.
//   - Locks tells who has the store locked, and waits with a limit.
//
// The order at a start is: Restore, open the library, Check, Leftovers.Recover,
// Begin. docs/decisions/0009-power-cuts.md has the reasons.
package durable
