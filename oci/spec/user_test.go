package spec

import (
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

var (
	passwdFile = written(`root:x:0:0:root:/root:/bin/sh
# comment:x:7:7::/:
+::::::
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin

app:x:1000:1000:App,,,:/home/app:/bin/sh
app:x:2000:2000:a second of that name:/second:/bin/sh
alias:x:1000:5000:a second of that number:/alias:/bin/sh
short:x:1001:1001
broken:x:abc:1:::
huge:x:4294967296:0::/:
negative:x:-1:0::/:
octal:x:010:0::/:
1234:x:1300:1300:a number for a name:/n:/bin/sh
 indented:x:1400:1400::/i:/bin/sh
windows:x:1500:1500\r
`)
	groupFile = written(`root:x:0:
daemon:x:1:
app:x:1000:
wheel:x:10:root,app
audio:x:29: app , other
broken:x:x:app
huge:x:4294967296:app
second:x:10:app
lonely:x:77
apple:x:78:apple,application
indented:x:1400: windows
\twindows:x:1500\r
`)
)

// written puts the white space into a file that a raw string cannot show.
func written(file string) string { return strings.NewReplacer(`\t`, "\t", `\r`, "\r").Replace(file) }

func value(n int64) *cri.Int64Value { return &cri.Int64Value{Value: n} }

func TestIdentify(t *testing.T) {
	type sec = cri.LinuxContainerSecurityContext
	for _, c := range []struct {
		name  string
		sc    *sec
		image string
		want  Identity
	}{
		{"nothing said", nil, "", Identity{0, 0, []uint32{0}, "root", "root", "/root"}},
		{"image uid", nil, "1000", Identity{1000, 1000, []uint32{10, 29, 1000}, "app", "app", "/home/app"}},
		{"image name", nil, "app", Identity{1000, 1000, []uint32{10, 29, 1000}, "app", "app", "/home/app"}},
		{"image uid:gid", nil, "1000:77", Identity{1000, 77, []uint32{10, 29, 77}, "app", "lonely", "/home/app"}},
		{"image name:group", nil, "app:audio", Identity{1000, 29, []uint32{10, 29}, "app", "audio", "/home/app"}},
		{"image uid:group", nil, "9999:daemon", Identity{9999, 1, []uint32{1}, "", "daemon", "/"}},
		{"image name:gid", nil, "daemon:4242", Identity{1, 4242, []uint32{4242}, "daemon", "", "/usr/sbin"}},
		{"unknown uid", nil, "9999", Identity{9999, 0, []uint32{0}, "", "root", "/"}},
		{"largest", nil, "2147483647:2147483647", Identity{1<<31 - 1, 1<<31 - 1, []uint32{1<<31 - 1}, "", "", "/"}},
		{"image uid and no group", nil, "1000:", Identity{1000, 1000, []uint32{10, 29, 1000}, "app", "app", "/home/app"}},
		{"image name and no group", nil, "app:", Identity{1000, 1000, []uint32{10, 29, 1000}, "app", "app", "/home/app"}},
		{"image group alone", nil, ":audio", Identity{0, 29, []uint32{10, 29}, "root", "audio", "/root"}},
		{"image gid alone", nil, ":77", Identity{0, 77, []uint32{10, 77}, "root", "lonely", "/root"}},
		{"image colon alone", nil, ":", Identity{0, 0, []uint32{0, 10}, "root", "root", "/root"}},
		{"leading zeros", nil, "001000:0077", Identity{1000, 77, []uint32{10, 29, 77}, "app", "lonely", "/home/app"}},
		{"leading zeros in passwd", nil, "octal", Identity{10, 0, []uint32{0}, "octal", "root", "/"}},
		{"short entry", nil, "short", Identity{1001, 1001, []uint32{1001}, "short", "", ""}},
		{"white space before an entry", nil, "indented:windows", Identity{1400, 1500, []uint32{1500}, "indented", "windows", "/i"}},
		{"entries written on Windows", nil, "windows", Identity{1500, 1500, []uint32{1400, 1500}, "windows", "windows", ""}},
		{"a number is not a name", nil, "1234", Identity{1234, 0, []uint32{0}, "", "root", "/"}},
		{"request over image", &sec{RunAsUser: value(1)}, "app:audio", Identity{1, 1, []uint32{1}, "daemon", "daemon", "/usr/sbin"}},
		{"request root", &sec{RunAsUser: value(0)}, "app", Identity{0, 0, []uint32{0, 10}, "root", "root", "/root"}},
		{"request name", &sec{RunAsUsername: "app"}, "daemon", Identity{1000, 1000, []uint32{10, 29, 1000}, "app", "app", "/home/app"}},
		{"request group", &sec{RunAsUser: value(1000), RunAsGroup: value(3000)}, "", Identity{1000, 3000, []uint32{10, 29, 3000}, "app", "", "/home/app"}},
		{"request name and group", &sec{RunAsUsername: "app", RunAsGroup: value(0)}, "", Identity{1000, 0, []uint32{0, 10, 29}, "app", "root", "/home/app"}},
		{"supplemental", &sec{RunAsUser: value(9999), SupplementalGroups: []int64{5, 3, 5}}, "", Identity{9999, 0, []uint32{0, 3, 5}, "", "root", "/"}},
		{"merge", &sec{RunAsUser: value(1000), SupplementalGroups: []int64{29, 5}}, "", Identity{1000, 1000, []uint32{5, 10, 29, 1000}, "app", "app", "/home/app"}},
		{"strict", &sec{RunAsUser: value(1000), SupplementalGroups: []int64{29, 5}, SupplementalGroupsPolicy: cri.SupplementalGroupsPolicy_Strict}, "",
			Identity{1000, 1000, []uint32{5, 29, 1000}, "app", "app", "/home/app"}},
	} {
		got, err := identify(c.sc, c.image, passwdFile, groupFile)
		if c.name == "nothing said" {
			c.want.Groups = []uint32{0, 10} // wheel has root
		}
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if !slices.Equal(got.Groups, c.want.Groups) {
			t.Errorf("%s: groups %v, want %v", c.name, got.Groups, c.want.Groups)
		}
		got.Groups, c.want.Groups = nil, nil
		if got.UID != c.want.UID || got.GID != c.want.GID || got.Username != c.want.Username ||
			got.Groupname != c.want.Groupname || got.Home != c.want.Home {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}

// A line of any length is read (runc#3036: more than 64 KiB).
func TestLongLinesOfGroups_runc_3036(t *testing.T) {
	long := "many:x:300:" + strings.Repeat("somebody,", 20_000) + "app\n"
	got, err := identify(nil, "app", passwdFile, long+"after:x:301:app\n")
	if want := []uint32{300, 301, 1000}; err != nil || !slices.Equal(got.Groups, want) {
		t.Errorf("groups %v, %v, want %v", got.Groups, err, want)
	}
}

func TestIdentifyRefused(t *testing.T) {
	type sec = cri.LinuxContainerSecurityContext
	for name, c := range map[string]struct {
		sc    *sec
		image string
	}{
		"group without user":      {&sec{RunAsGroup: value(5)}, "app"},
		"user twice":              {&sec{RunAsUser: value(5), RunAsUsername: "app"}, ""},
		"unknown name":            {&sec{RunAsUsername: "nobody"}, ""},
		"name that is a number":   {&sec{RunAsUsername: "1000"}, ""},
		"name with group":         {&sec{RunAsUsername: "app:audio"}, ""},
		"negative user":           {&sec{RunAsUser: value(-1)}, ""},
		"user beyond 31 bits":     {&sec{RunAsUser: value(1 << 31)}, ""},
		"user 2^32":               {&sec{RunAsUser: value(1 << 32)}, ""},
		"negative group":          {&sec{RunAsUser: value(1), RunAsGroup: value(-1)}, ""},
		"group 2^32":              {&sec{RunAsUser: value(1), RunAsGroup: value(1 << 32)}, ""},
		"supplemental negative":   {&sec{SupplementalGroups: []int64{-1}}, ""},
		"supplemental 2^32":       {&sec{SupplementalGroups: []int64{1 << 32}}, ""},
		"unknown image user":      {nil, "nobody"},
		"unknown image group":     {nil, "app:nobody"},
		"image user of bad line":  {nil, "broken"},
		"image user out of range": {nil, "huge"},
		"image user negative":     {nil, "negative"},
		"comment as user":         {nil, "# comment"},
	} {
		if got, err := identify(c.sc, c.image, passwdFile, groupFile); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	if _, err := identify(&sec{SupplementalGroupsPolicy: 7}, "", "", ""); !errors.Is(err, fault.Unimplemented) {
		t.Errorf("unknown policy: %v", err)
	}
	if _, err := identify(nil, "nobody", passwdFile, ""); err == nil || !strings.Contains(err.Error(), `"nobody"`) || !strings.Contains(err.Error(), "/etc/passwd") {
		t.Errorf("the error does not say which name is missing where: %v", err)
	}
}

// Something that looks like a number is either in range or an error. The passwd
// file has each as a name, with root's number, to catch a look-up.
func TestUserOutOfRange_CVE_2024_40635_CVE_2026_46680(t *testing.T) {
	for _, user := range []string{
		"2147483648", "4294967295", "4294967296", "9223372036854775808", "18446744073709551616",
		"-1", "-0", "+0", "+1000", "0x0", "0x3e8", "0b1", "1e3", "1_000", "1000x", "02147483648",
		strings.Repeat("9", 70),
	} {
		passwd := user + ":x:0:0::/:/bin/sh\nroot:x:0:0::/:/bin/sh\n"
		for _, form := range []string{user, user + ":0", "0:" + user, "root:" + user} {
			got, err := identify(nil, form, passwd, user+":x:0:\n")
			if !errors.Is(err, fault.Invalid) {
				t.Errorf("%.80q: %+v, %v", form, got, err)
			}
		}
	}
	for _, user := range []string{"::", "0::", "::0", ":0:", "a:b:c", "0:0:0"} {
		if got, err := identify(nil, user, passwdFile, groupFile); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q: %+v, %v", user, got, err)
		}
	}
}

func TestTooManyGroups(t *testing.T) {
	var groups strings.Builder
	for n := range maxGroups + 1 {
		groups.WriteString("g:x:" + strconv.Itoa(n+1) + ":app\n")
	}
	if _, err := identify(nil, "app", passwdFile, groups.String()); !errors.Is(err, fault.Invalid) {
		t.Error(err)
	}
}

func TestIdentityCRI(t *testing.T) {
	got := Identity{UID: 1, GID: 2, Groups: []uint32{2, 3}}.CRI().GetLinux()
	if got.GetUid() != 1 || got.GetGid() != 2 || !slices.Equal(got.GetSupplementalGroups(), []int64{2, 3}) {
		t.Errorf("got %v", got)
	}
}

func TestIdentityInUserNamespace(t *testing.T) {
	for name, u := range map[string]Identity{
		"user":  {UID: 65536},
		"group": {GID: 65536},
		"extra": {Groups: []uint32{0, 65536}},
	} {
		in := typical()
		userNamespacePod(&in)
		in.Facts.User = u
		if _, err := Container(in); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s beyond the mapping: %v", name, err)
		}
	}
}

// Whatever HOME holds, passwd grows by one line of seven fields.
func TestHomeInPasswd_CVE_2022_4318_CVE_2026_15809(t *testing.T) {
	u := Identity{UID: 1000, GID: 2000}
	for home, want := range hostileHomes() {
		line := u.PasswdLine(home)
		if wanted := "user1000:*:1000:2000::" + want + ":/sbin/nologin\n"; line != wanted {
			t.Errorf("home %.40q gives %.80q", home, line)
		}
	}
	if got := u.GroupLine(); got != "group2000:x:2000:\n" {
		t.Errorf("group line %q", got)
	}
	u.Username, u.Groupname = "app", "app"
	if u.PasswdLine("/") != "" || u.GroupLine() != "" {
		t.Error("lines for a user whom the image knows")
	}
}

func FuzzParseUser(f *testing.F) {
	for _, seed := range []string{"", "0", "app:audio", "-1", "0x0", "00", "1:2:3", "4294967296", ":"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		user, group, err := parseUser(s)
		if err != nil {
			if !errors.Is(err, fault.Invalid) {
				t.Fatal(err)
			}
			return
		}
		// What is accepted is what was written, but for leading zeros and empty halves.
		differs := func(a account, written string) bool {
			number, err := strconv.Atoi("0" + written)
			return a.name != written && (a.name != "" || err != nil || number != int(a.id))
		}
		userText, groupText, _ := strings.Cut(s, ":")
		if differs(user, userText) || differs(group, groupText) || group.absent != (groupText == "") {
			t.Fatalf("%q was read as %+v %+v", s, user, group)
		}
		if user.id > maxID || group.id > maxID || user.name != "" && numeric(user.name) {
			t.Fatalf("%q gives %+v %+v", s, user, group)
		}
	})
}

func FuzzPasswd(f *testing.F) {
	f.Add(passwdFile, groupFile, "app", "1000")
	f.Add("a:b:c", ":::::::::", "a", "0:a")
	f.Fuzz(func(t *testing.T, passwd, group, name, image string) {
		for _, sc := range []*cri.LinuxContainerSecurityContext{nil, {RunAsUsername: name}} {
			id, err := identify(sc, image, passwd, group)
			if err != nil {
				if !errors.Is(err, fault.Invalid) {
					t.Fatal(err)
				}
				continue
			}
			if !slices.Contains(id.Groups, id.GID) || !slices.IsSorted(id.Groups) || id.UID > maxID {
				t.Fatalf("%+v", id)
			}
			if line := id.PasswdLine(id.Home); strings.Count(line, "\n") > 1 || line != "" && strings.Count(line, ":") != 6 {
				t.Fatalf("%q", line)
			}
			if sc != nil && name != "" && id.Username != name {
				t.Fatalf("asked for %q, got %+v", name, id)
			}
		}
	})
}
