//go:build differential

package differential

import "regexp"

// Verdicts on an image or a layer, other than that both tools do the same.
const (
	different      = "different"
	refusedByUs    = "refused by crius alone" // nothing is known that should be
	refusedByThem  = "refused by the other tool alone"
	cannotBeReread = "not readable"
	cannotRebuild  = "cannot be rebuilt"
)

// known are the differences that have a reason.
var known = []struct {
	verdict string
	name    *regexp.Regexp // of the image
	detail  string         // a part of the difference
	reason  string
}{
	{different, regexp.MustCompile(`^attributes by`), `user.a=""`, "Debian's library leaves out attributes without a value"},
	{different, regexp.MustCompile(`trusted attributes$`), "trusted.", "overlayfs would follow trusted attributes"},
	{different, regexp.MustCompile(`^header global header`), `"./PaxHeaders"`, "Debian's library makes a directory for a header that is no file"},
	{refusedByThem, regexp.MustCompile(`attributes of a (link|pipe)$`), "lsetxattr", "the kernel takes no user.* there, and crius leaves them out"},
	{refusedByThem, regexp.MustCompile(`(names with \.\.|through it|link to the outside)$`), "no such file or directory", "Debian's library reads the files back by name, without the root of the layer"},
	{refusedByThem, regexp.MustCompile(`(twice|over a file|over a hard link|then directory|then file|then link|then link to it|then whiteout|whiteout of a hard link)$|^generated`), "", "a path twice, of which the last entry counts"},
	{refusedByThem, regexp.MustCompile(`contiguous file$`), "unhandled tar header type", "POSIX has such files read as regular ones"},
	{cannotRebuild, regexp.MustCompile(`^sparse by`), "", "the record of an archive does not have its map of holes"},
	{cannotRebuild, regexp.MustCompile(`^header whiteout with content$`), "", "a whiteout has no file from which its content could be read back"},
	{cannotRebuild, regexp.MustCompile(`(twice|over a file|over a hard link|then directory|then file|then link|then link to it)$|^generated`), "", "a path twice has the content of the last entry"},
	{cannotRebuild, regexp.MustCompile(`(names with \.\.|through it|link to the outside)$`), "", "files are read back by their names in the archive"},
}
