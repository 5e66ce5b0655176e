//go:build browser

package statuspage

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/crius-run/crius/test/kit/browser"
)

// A real browser shows all names as text, contacts only crius, runs nothing,
// and fits the page to any screen, in light and dark mode.
func TestBrowserShowsPage(t *testing.T) {
	var asked atomic.Int32
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer elsewhere.Close()
	hostile := []string{
		"web", strings.Repeat("long-name-without-a-break", 20),
		`<script src="` + elsewhere.URL + `/a.js"></script><script>window.taken = 1</script>`,
		`"><img src="` + elsewhere.URL + `/b.png" onerror="window.taken = 1">`,
		`</style><link rel="stylesheet" href="` + elsewhere.URL + `/c.css"><style>body{display:none}`,
		`</table><iframe src="` + elsewhere.URL + `/d"></iframe><base href="` + elsewhere.URL + `">`,
	}
	for _, name := range hostile {
		server := httptest.NewServer(Handler(node(name, 3)))
		tab := browser.Open(t)
		url := server.URL + "/status"
		want := []string{}
		for _, colours := range []string{"light", "dark"} {
			for _, width := range []int{320, 768, 1600} {
				tab.Show(url, width, colours)
				want = append(want, url)
				checkScreen(t, tab, name, width, colours)
			}
		}
		if !slices.Equal(tab.Requests, want) {
			t.Errorf("%.60q: the browser asks for %q", name, tab.Requests)
		}
		if len(tab.Complaints) > 0 {
			t.Errorf("%.60q: the browser complains: %q", name, tab.Complaints)
		}
		server.Close()
	}
	if n := asked.Load(); n > 0 {
		t.Errorf("%d requests went elsewhere", n)
	}
}

func checkScreen(t *testing.T, tab *browser.Tab, name string, width int, colours string) {
	t.Helper()
	var page struct {
		Text, Colour, Foreign string
		Wide, Room, Screen    int
		Height                int
		Taken                 bool
	}
	tab.Evaluate(`({
		text: document.body.innerText,
		colour: getComputedStyle(document.body).color,
		foreign: [...document.querySelectorAll("script,img,link,iframe,base,object,[onerror]")].map(e => e.outerHTML).join(),
		wide: document.documentElement.scrollWidth, room: document.documentElement.clientWidth, screen: window.innerWidth,
		height: document.body.offsetHeight,
		taken: window.taken !== undefined,
	})`, &page)
	where := fmt.Sprintf("%.60q, %d pixels, %s", name, width, colours)
	if want := short("ns/" + name); strings.Count(page.Text, want) < 3 || !strings.Contains(page.Text, "runc 1.3") || page.Height < 100 {
		t.Errorf("%s: %q is not on the page:\n%s", where, want, page.Text)
	}
	if page.Screen != width || page.Wide > page.Room {
		t.Errorf("%s: the page is %d wide, and there is room for %d on a screen of %d", where, page.Wide, page.Room, page.Screen)
	}
	if want := map[string]string{"light": "rgb(0, 0, 0)", "dark": "rgb(255, 255, 255)"}[colours]; page.Colour != want {
		t.Errorf("%s: text is %s, want %s", where, page.Colour, want)
	}
	if page.Foreign != "" || page.Taken {
		t.Errorf("%s: it has %s, and scripts have run: %v", where, page.Foreign, page.Taken)
	}
}
