package spec

import (
	"fmt"
	"iter"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	// maxID is the largest accepted user or group id. Larger ones turn negative
	// in programs that keep ids in a signed int (CVE-2024-40635).
	maxID = 1<<31 - 1

	// maxGroups is the kernel's NGROUPS_MAX.
	maxGroups = 65536
)

// Identity is the user and groups of a container's first process. The zero
// value is root without supplementary groups.
type Identity struct {
	UID, GID uint32
	Groups   []uint32 // supplementary; ResolveUser always includes GID (CVE-2022-2995)

	Username  string // name of UID in the image; empty: it has none
	Groupname string // name of GID in the image; empty: it has none
	Home      string // from the image's passwd, unchanged
}

// CRI returns the identity in the form that a container's status reports.
func (u Identity) CRI() *cri.ContainerUser {
	user := &cri.LinuxContainerUser{Uid: int64(u.UID), Gid: int64(u.GID)}
	for _, gid := range u.Groups {
		user.SupplementalGroups = append(user.SupplementalGroups, int64(gid))
	}
	return &cri.ContainerUser{Linux: user}
}

// PasswdLine returns the line to append to the passwd of a root file system so
// that the user has a name there, with home as its directory. The name is "user"
// and the number: shadow, systemd and others refuse names of digits alone
// (cri-o#9432). Its password is "*": "x" stands for an entry of the shadow file, and without one PAM takes the
// account for locked (podman#7499). The line is empty if the image knows the user. Whatever home
// contains, it is one line of seven fields (CVE-2022-4318, CVE-2026-15809).
func (u Identity) PasswdLine(home string) string {
	if u.Username != "" {
		return ""
	}
	return fmt.Sprintf("user%d:*:%d:%d::%s:/sbin/nologin\n", u.UID, u.UID, u.GID, cleanHome(home))
}

// GroupLine is PasswdLine for the group file; the name is "group" and the number.
func (u Identity) GroupLine() string {
	if u.Groupname != "" {
		return ""
	}
	return fmt.Sprintf("group%d:x:%d:\n", u.GID, u.GID)
}

// cleanHome returns home if it can stand in a passwd line, else the root
// directory.
func cleanHome(home string) string {
	bad := func(r rune) bool { return r == ':' || r == unicode.ReplacementChar || !unicode.IsPrint(r) }
	if !path.IsAbs(home) || len(home) > 4096 || strings.ContainsFunc(home, bad) {
		return "/"
	}
	return home
}

// identity writes the resolved user, which must exist in the user namespace.
func identity(in *Input, s *specs.Spec) error {
	u := in.Facts.User
	s.Process.User = specs.User{UID: u.UID, GID: u.GID, AdditionalGids: slices.Clone(u.Groups), Umask: in.Asked.Umask}

	users := in.podSecurity().GetNamespaceOptions().GetUsernsOptions()
	if !ownUserNamespace(in.Request.Pod) {
		return nil
	}
	if !mapped(users.GetUids(), u.UID) {
		return invalid("user %d is outside the pod's user namespace", u.UID)
	}
	for _, gid := range append([]uint32{u.GID}, u.Groups...) {
		if !mapped(users.GetGids(), gid) {
			return invalid("group %d is outside the pod's user namespace", gid)
		}
	}
	return nil
}

// account is a requested user or group: a number or a name.
type account struct {
	id     uint32
	name   string
	absent bool
}

// wantedUser picks the user and group: the request's, else the image's.
func wantedUser(sc *cri.LinuxContainerSecurityContext, imageUser string) (user, group account, err error) {
	group.absent = true
	switch {
	case sc.GetRunAsUser() != nil && sc.GetRunAsUsername() != "":
		return user, group, invalid("run_as_user and run_as_username are both set: set only one")
	case sc.GetRunAsUser() != nil:
		user.id, err = checkID("run_as_user", sc.GetRunAsUser().GetValue())
	case sc.GetRunAsUsername() != "":
		user.name = sc.GetRunAsUsername()
		if numeric(user.name) || strings.Contains(user.name, ":") {
			err = invalid("run_as_username %.80q is not a user name", user.name)
		}
	case sc.GetRunAsGroup() != nil:
		err = invalid("run_as_group %d requires run_as_user or run_as_username", sc.GetRunAsGroup().GetValue())
	default:
		user, group, err = parseUser(imageUser)
	}
	if err == nil && sc.GetRunAsGroup() != nil {
		group = account{}
		group.id, err = checkID("run_as_group", sc.GetRunAsGroup().GetValue())
	}
	return user, group, err
}

// parseUser reads an image's User: user or user:group, each a number or a name. An
// empty user is root, and an empty group that of the user, as in Docker.
func parseUser(s string) (user, group account, err error) {
	userText, groupText, _ := strings.Cut(s, ":")
	if user, err = parseAccount(userText); err == nil {
		group, err = parseAccount(groupText)
	}
	if err != nil {
		return user, group, fmt.Errorf("user %.80q of the image: %w", s, err)
	}
	group.absent = groupText == ""
	return user, group, nil
}

func parseAccount(s string) (account, error) {
	if strings.Contains(s, ":") {
		return account{}, invalid("must be of the form user or user:group")
	}
	if s == "" || !numeric(s) {
		return account{name: s}, nil
	}
	id, ok := parseID(s)
	if !ok {
		return account{}, invalid("%.20q is not a number between 0 and %d", s, maxID)
	}
	return account{id: id}, nil
}

// numeric reports whether s must be a number. A malformed number is never
// looked up as a name: the kubelet took it for a non-root user (CVE-2024-40635,
// CVE-2026-46680).
func numeric(s string) bool {
	return s != "" && (s[0] == '+' || s[0] == '-' || '0' <= s[0] && s[0] <= '9')
}

// parseID accepts a decimal number up to maxID, with leading zeros as people write
// them who think of modes.
func parseID(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 31)
	return uint32(n), err == nil
}

func checkID(field string, id int64) (uint32, error) {
	if id < 0 || id > maxID {
		return 0, invalid("%s %d is not between 0 and %d", field, id, maxID)
	}
	return uint32(id), nil
}

// identify resolves user and group with the contents of the image's passwd and
// group files.
func identify(sc *cri.LinuxContainerSecurityContext, imageUser, passwd, groups string) (Identity, error) {
	user, group, err := wantedUser(sc, imageUser)
	if err != nil {
		return Identity{}, err
	}
	entry, known := findUser(passwd, user)
	if !known && user.name != "" {
		return Identity{}, invalid("no user %.80q in the image's /etc/passwd", user.name)
	}
	id := Identity{UID: user.id, Home: "/"}
	if known {
		id = Identity{UID: entry.uid, GID: entry.gid, Username: entry.name, Home: entry.home}
	}
	switch {
	case group.absent:
	case group.name == "":
		id.GID = group.id
	default:
		if id.GID, known = findGroup(groups, group.name); !known {
			return Identity{}, invalid("no group %.80q in the image's /etc/group", group.name)
		}
	}
	id.Groups, id.Groupname, err = supplementary(sc, id, groups)
	return id, err
}

// supplementary returns the process's supplementary groups, sorted, and the
// name of its primary group.
func supplementary(sc *cri.LinuxContainerSecurityContext, id Identity, groups string) ([]uint32, string, error) {
	gids := []uint32{id.GID}
	for _, asked := range sc.GetSupplementalGroups() {
		gid, err := checkID("supplemental group", asked)
		if err != nil {
			return nil, "", err
		}
		gids = append(gids, gid)
	}
	policy := sc.GetSupplementalGroupsPolicy()
	if _, ok := cri.SupplementalGroupsPolicy_name[int32(policy)]; !ok {
		return nil, "", unimplemented("supplemental_groups_policy %d is unknown", policy)
	}
	merge := policy == cri.SupplementalGroupsPolicy_Merge && id.Username != ""
	primary := ""
	for g := range groupEntries(groups) {
		if g.gid == id.GID && primary == "" {
			primary = g.name
		}
		if merge && g.has(id.Username) {
			gids = append(gids, g.gid)
		}
	}
	slices.Sort(gids)
	gids = slices.Compact(gids)
	if len(gids) > maxGroups {
		return nil, "", invalid("the user is in %d groups, the kernel allows %d", len(gids), maxGroups)
	}
	return gids, primary, nil
}

type userEntry struct {
	name, home string
	uid, gid   uint32
}

// findUser returns the first entry with that name or number, as libc does.
func findUser(passwd string, want account) (userEntry, bool) {
	for fields := range entries(passwd, 4) {
		uid, okUID := parseID(fields[2])
		gid, okGID := parseID(fields[3])
		if !okUID || !okGID || want.name == "" && uid != want.id || want.name != "" && fields[0] != want.name {
			continue
		}
		entry := userEntry{name: fields[0], uid: uid, gid: gid}
		if len(fields) > 5 {
			entry.home = fields[5]
		}
		return entry, true
	}
	return userEntry{}, false
}

type groupEntry struct {
	name, members string
	gid           uint32
}

func (g groupEntry) has(user string) bool {
	for member := range strings.SplitSeq(g.members, ",") {
		if strings.TrimSpace(member) == user {
			return true
		}
	}
	return false
}

func findGroup(groups, name string) (uint32, bool) {
	for g := range groupEntries(groups) {
		if g.name == name {
			return g.gid, true
		}
	}
	return 0, false
}

func groupEntries(groups string) iter.Seq[groupEntry] {
	return func(yield func(groupEntry) bool) {
		for fields := range entries(groups, 3) {
			gid, ok := parseID(fields[2])
			if !ok {
				continue
			}
			g := groupEntry{name: fields[0], gid: gid}
			if len(fields) > 3 {
				g.members = fields[3]
			}
			if !yield(g) {
				return
			}
		}
	}
}

// entries yields the lines of a passwd or group file that have a name and at
// least that many fields. White space around a line, such as the carriage return
// of a file written on Windows, counts for nothing, as with other runtimes.
func entries(file string, fields int) iter.Seq[[]string] {
	return func(yield func([]string) bool) {
		for line := range strings.Lines(file) {
			parts := strings.SplitN(strings.TrimSpace(line), ":", 8)
			if len(parts) < fields || parts[0] == "" || parts[0][0] == '#' {
				continue
			}
			if !yield(parts) {
				return
			}
		}
	}
}
